"""What an artifact for browsers may hold: chat templates and tokenizers that the web engine follows."""
