"""What the hook does in a program that uses TensorFlow; steps of Keras are marked by `keras.py`, one folder
up.

`sessions.py`  TensorFlow 1: steps of sessions, as marks, and windows over them
`tracer.py`    a window of TensorFlow's profiler: begin, stop, write
`scopes.py`    the names of layers in what Keras makes for TensorFlow, and the dataflow between them
"""
