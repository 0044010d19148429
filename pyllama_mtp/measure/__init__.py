"""Measuring: the cells of a speed matrix and the acceptance of drafts, measured, kept and shown.

Models and sessions are the driver's own objects. Only `runner.LibraryProcess` loads a native
library, in a process of its own.
"""
