"""To few bits, and back."""
