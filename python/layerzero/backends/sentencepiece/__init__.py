"""SentencePiece."""
