"""Test cases of the tensor operations, one module per family.

Every family module has `CASES`, which maps an operation's id to the function that gives its
cases, and `check()`, which compares the family's reference with something independent of it.
"""
