"""A library whose kernels go wrong in every way one can think of, for every operation there is.

`plugin.register` is an entry point like any other library's; `kinds.FAULTS` are the ways; `plugin.faulty` chooses one.
"""
