"""A trained model as a Hugging Face folder, made from storage alone."""
