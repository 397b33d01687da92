"""Backends that were never run on the hardware they are for. They are used where the setting `backends.unproven` names them."""
