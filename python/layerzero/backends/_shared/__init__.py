"""Code that several backends use. A backend imports from here, and never from another backend."""
