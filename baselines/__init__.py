"""The methods that SAPO is compared with: their advantage estimators and learners."""
