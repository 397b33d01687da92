"""LayerZero inside diffusers. Importing it registers nothing; `layerzero.integrations.diffusers` does."""
