"""FlashInfer: what its two backends share."""
