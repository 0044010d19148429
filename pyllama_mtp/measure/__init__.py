"""Measuring: what a cell of a speed matrix is, how it is measured, kept and shown.

Nothing here calls the native library; models and sessions come in as the driver's own objects. Only
`worker` loads one, in a process of its own.
"""
