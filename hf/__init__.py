"""What a Hugging Face model brings: templates, loading, attention, compiling, and checks of it."""
