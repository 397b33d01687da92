"""FlashAttention 4: what its three backends share."""
