"""What the hook does in a program that uses PyTorch. Read it in this order:

`loop.py`             steps and epochs of the training, as marks
`tracer.py`           a window of PyTorch's profiler: begin, stop, write
`modules.py`          the path of every module called in a window, and the dataflow between modules
`compiled.py`         the same for what torch.compile made
`conflicts.py`        what the program does that a profiler of ours would break
`background_stop.py`  stopping the profiler on a background thread
`detach.py`           leaving the GPU's profiling library, CUPTI, afterwards
"""
