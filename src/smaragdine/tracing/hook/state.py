"""What the hook remembers: one object per process, `process`, with a part for each of its tasks.

Nothing else in the hook changes while the program runs. A forked child begins with a copy of its parent's
object. What is of use in one process only stands beside that process's number, and whoever reads it compares
the number; what PyTorch's profiler has left is cleared by the fork itself (`torch/tracer.py`).

Every Python process of a program loads this file: it imports nothing that an interpreter has to look for.
"""

from _thread import RLock, _local


class MarksState:
    def __init__(self):
        self.spool = None  # the folder that marks are written to; None: nobody records
        self.file = None  # (process, descriptor, device, inode) of the open file
        self.torn = False  # the last line is incomplete: the next one must not be glued to it
        self.rank = None  # (process, rank)
        self.waiting = []  # (process, t_ns, name, index, source) of marks to be written; threads only append
        self.waiting_since_ns = 0
        self.quoted = {}  # names and sources as JSON
        self.failed = set()  # frameworks of which an error has been told
        self.dropped = 0  # marks that were lost
        self.follower = None  # is called with every mark but the beginnings of steps


class TraceState:
    def __init__(self):
        self.asked = False  # by the program's own code, at any time: names are worth some care from now on
        self.settings = None  # TraceSettings; None: nothing is traced
        self.plan = None  # the WindowPlan, which knows its process
        self.lock = RLock()  # held by whoever works on the plan; a forked child takes a new one
        self.postponed = []  # (plan, work): what signal handlers wanted while their own thread had the lock
        self.watching = None  # (process, settings) that a thread watches


class TorchState:
    def __init__(self):
        self.loop = None  # what was seen of the training loop; it knows its process
        # The window that runs.
        self.session = None  # the TorchSession
        self.ending = None  # the Ending of the last one, which may still be writing
        self.hooked = False  # what waits for the next call of a module does so by a hook
        self.forks_watched = False
        # The program's own profiler.
        self.prepared = False  # and not begun
        self.listening = []  # functions to call before it begins, with whether it is only prepared
        # Calls of modules.
        self.calls = None  # the Calls that are annotated
        self.edges = {}  # dataflow between modules; every window tells it, for one may be thrown away later
        self.edges_done = set()  # outermost modules whose dataflow is known
        # Compiled modules.
        self.compiled_facts = None  # (how much was compiled then, the facts)
        self.compiled_call = None  # the function that calls a compiled module, as PyTorch has it
        self.compiled_around = []  # what lies around it, the innermost first
        # The profiler's end.
        self.graphs = None  # a WeakSet of the CUDA graphs being captured: one that is never ended goes, too
        self.functions = None  # of PyTorch's library; False where they are not to be had
        self.looking = RLock()  # held while threads are looked at, and during a fork; a signal may look again
        self.leaving = []  # threads of Kineto's that may still wait for a call of CUDA
        self.patience_s = 0.0  # for how long the program waits for them, once
        self.told_to_leave = False  # Kineto, by a variable that is ours to take back
        self.program_ends = False


class TensorFlowState:
    def __init__(self):
        self.steps = 0  # runs of sessions that were steps
        self.thread = _local()  # depth: runs inside runs; step: the outermost is one
        self.window = None  # the SessionWindow that is open; it knows its process
        self.event = None  # what makes an event of the profiler, while ours runs
        self.exact = False  # scopes have kept their names: in a function with gradients, or by events of ours
        self.roots = None  # graph → names of its outermost scopes, by weak references
        self.graph_facts = None  # graph → what is known of it, by weak references


class KerasState:
    def __init__(self):
        self.open = {}  # "train", "evaluate" or "predict" → weak reference to the CallbackList that began it
        # Of the open training.
        self.base = 0  # steps in the epochs before this one
        self.done = 0  # steps seen so far
        self.ended = None  # the last step that ended


class TransformersState:
    def __init__(self):
        self.epoch = 0
        self.inside = {"evaluate": 0, "predict": 0}  # calls under way


class Process:
    def __init__(self):
        self.installed = False  # frameworks are patched, or will be
        self.patches = {}  # module → what to do right after it was executed
        self.trainer = None  # (process, weak reference to the object that trains)
        self.marks = MarksState()
        self.trace = TraceState()
        self.torch = TorchState()
        self.tensorflow = TensorFlowState()
        self.keras = KerasState()
        self.transformers = TransformersState()
        self.lightning_step = 0  # the one under way
        self.nnx = _local()  # stack: calls of flax.nnx modules under way in a thread


process = Process()
