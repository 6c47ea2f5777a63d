"""Tries power limits while one program runs, and settles on the best.

slices (what a few steps at one limit told) → policy (which limit next) ← drift (has the workload changed?);
steps and energy follow the program live, collect makes slices of them, tuner is the loop, process and client
run it beside the program, outcome says what came of it.
"""
