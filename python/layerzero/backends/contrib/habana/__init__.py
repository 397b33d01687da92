"""Intel Gaudi (HPU)."""
