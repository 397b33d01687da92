"""LayerZero inside transformers. Importing it registers nothing; `layerzero.integrations.transformers` does."""
