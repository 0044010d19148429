"""The parts of bench/gpu_runbook.py: its state, its checks, and a module for each kind of step."""
