"""What a Hugging Face model brings: templates, loading, adapters, attention, compiling, checks."""
