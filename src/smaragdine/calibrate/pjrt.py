"""XLA's plugin for GPUs through its C interface (PJRT): standard library alone, Python 3.8.

JAX hands a plugin its programs as StableHLO, which has no words for what XLA made of them: the settings of a
fusion are lost on the way. The plugin itself also takes HLO, and its interface keeps its layout from version
to version: a field's place never changes, and new ones come last.
"""

import ctypes
from ctypes import POINTER, c_char_p, c_int, c_int64, c_size_t, c_void_p

# Places in the table of functions. Before them it has its size, its extensions and its version.
_AT = {
    "Error_Destroy": 5,
    "Error_Message": 6,
    "Plugin_Initialize": 8,
    "Event_Destroy": 10,
    "Event_Await": 13,
    "Client_Create": 15,
    "Client_PlatformVersion": 19,
    "Client_AddressableDevices": 21,
    "Client_Compile": 25,
    "Client_BufferFromHostBuffer": 27,
    "Executable_Destroy": 45,
    "Executable_NumOutputs": 49,
    "LoadedExecutable_Destroy": 55,
    "LoadedExecutable_GetExecutable": 56,
    "LoadedExecutable_Execute": 60,
    "Buffer_Destroy": 63,
}


class PjrtError(Exception):
    """What the plugin said."""


def _exact(name, *fields):
    """All begin with their size and their extensions."""
    head = [("struct_size", c_size_t), ("extension", c_void_p)]
    return type(name, (ctypes.Structure,), {"_fields_": head + list(fields)})


def _struct(name, *fields):
    """The arguments of one function, with room for what later versions add: there, null stands for none."""
    return _exact(name, *fields, ("later", c_void_p * 16))


_Error = _struct("Error", ("error", c_void_p))
_Message = _struct("Message", ("error", c_void_p), ("message", c_void_p), ("size", c_size_t))
_Event = _struct("Event", ("event", c_void_p))
_Value = _exact(
    "Value",
    ("name", c_char_p),
    ("name_size", c_size_t),
    ("type", c_int),
    ("value", c_int64),
    ("value_size", c_size_t),
)
_Create = _struct(
    "Create",
    ("options", c_void_p),
    ("num_options", c_size_t),
    ("get", c_void_p),
    ("get_arg", c_void_p),
    ("put", c_void_p),
    ("put_arg", c_void_p),
    ("client", c_void_p),
    ("try_get", c_void_p),
    ("try_get_arg", c_void_p),
)
_Version = _struct("Version", ("client", c_void_p), ("text", c_void_p), ("size", c_size_t))
_Devices = _struct("Devices", ("client", c_void_p), ("devices", POINTER(c_void_p)), ("count", c_size_t))
_Program = _exact(
    "Program", ("code", c_char_p), ("size", c_size_t), ("format", c_char_p), ("format_size", c_size_t)
)
_Compile = _struct(
    "Compile",
    ("client", c_void_p),
    ("program", POINTER(_Program)),
    ("options", c_char_p),
    ("options_size", c_size_t),
    ("executable", c_void_p),
)
_Tiled = _exact(
    "Tiled",
    ("minor_to_major", POINTER(c_int64)),
    ("size", c_size_t),
    ("tile_dims", c_void_p),
    ("tile_dim_sizes", c_void_p),
    ("num_tiles", c_size_t),
)
_Layout = _exact("Layout", ("tiled", _Tiled), ("type", c_int))
_FromHost = _struct(
    "FromHost",
    ("client", c_void_p),
    ("data", c_void_p),
    ("type", c_int),
    ("dims", POINTER(c_int64)),
    ("num_dims", c_size_t),
    ("strides", POINTER(c_int64)),
    ("num_strides", c_size_t),
    ("semantics", c_int),
    ("device", c_void_p),
    ("memory", c_void_p),
    ("layout", POINTER(_Layout)),
    ("done", c_void_p),
    ("buffer", c_void_p),
)
_Buffer = _struct("Buffer", ("buffer", c_void_p))
_Loaded = _struct("Loaded", ("loaded", c_void_p), ("executable", c_void_p))
_One = _struct("One", ("of", c_void_p))
_Outputs = _struct("Outputs", ("executable", c_void_p), ("count", c_size_t))
_Options = _struct(
    "Options",
    ("send", c_void_p),
    ("recv", c_void_p),
    ("num_send", c_size_t),
    ("num_recv", c_size_t),
    ("launch", c_int),
    ("kept", c_void_p),
    ("num_kept", c_size_t),
    ("context", c_void_p),
)
_Execute = _struct(
    "Execute",
    ("executable", c_void_p),
    ("options", POINTER(_Options)),
    ("arguments", c_void_p),
    ("num_devices", c_size_t),
    ("num_arguments", c_size_t),
    ("outputs", c_void_p),
    ("events", c_void_p),
    ("device", c_void_p),
)


class Plugin:
    """A loaded plugin, and one client of it."""

    def __init__(self, path):
        library = ctypes.CDLL(path)
        library.GetPjrtApi.restype = c_void_p
        table = library.GetPjrtApi()
        self._table = ctypes.cast(table, POINTER(c_void_p))
        self._functions = {}
        self.version = ctypes.cast(table + 32, POINTER(c_int * 2)).contents[:]
        self.client = None
        self.device = None

    def call(self, name, arguments):
        arguments.struct_size = ctypes.sizeof(type(arguments))
        function = self._functions.get(name)
        if function is None:
            kind = ctypes.CFUNCTYPE(c_void_p, c_void_p)
            function = self._functions[name] = kind(self._table[_AT[name]])
        error = function(ctypes.addressof(arguments))
        if error and name not in ("Error_Message", "Error_Destroy"):
            said = _Message(error=error)
            self.call("Error_Message", said)
            text = ctypes.string_at(said.message, said.size).decode("utf-8", "replace")
            self.call("Error_Destroy", _Error(error=error))
            raise PjrtError(text)
        return arguments

    def initialize(self):
        self.call("Plugin_Initialize", _struct("Initialize")())

    def open(self):
        """A client of the first GPU that is visible, which takes no memory in advance."""
        option = _Value(name=b"preallocate", name_size=11, type=4, value=0, value_size=1)
        option.struct_size = ctypes.sizeof(_Value)
        created = _Create(options=ctypes.addressof(option), num_options=1)
        self.client = self.call("Client_Create", created).client
        self.device = self.call("Client_AddressableDevices", _Devices(client=self.client)).devices[0]

    def platform(self):
        said = self.call("Client_PlatformVersion", _Version(client=self.client))
        return ctypes.string_at(said.text, said.size).decode("utf-8", "replace")

    def compile(self, module, options):
        program = _Program(code=module, size=len(module), format=b"hlo", format_size=3)
        program.struct_size = ctypes.sizeof(_Program)
        asked = _Compile(
            client=self.client, program=ctypes.pointer(program), options=options, options_size=len(options)
        )
        return Executable(self, self.call("Client_Compile", asked).executable)

    def buffer(self, address, kind, dims, minor_to_major, item_bytes):
        """On the device, from memory that is laid out as the device wants it: nothing is turned around."""
        strides = [0] * len(dims)
        step = item_bytes
        for dimension in minor_to_major:
            strides[dimension] = step
            step *= dims[dimension]
        count = len(dims)
        words = c_int64 * max(count, 1)
        tiled = _Tiled(minor_to_major=words(*minor_to_major), size=count)
        tiled.struct_size = ctypes.sizeof(_Tiled)
        layout = _Layout(tiled=tiled, type=0)
        layout.struct_size = ctypes.sizeof(_Layout)
        asked = _FromHost(
            client=self.client,
            data=address,
            type=kind,
            dims=words(*dims),
            num_dims=count,
            strides=words(*strides),
            num_strides=count,
            semantics=0,
            device=self.device,
            layout=ctypes.pointer(layout),
        )
        made = self.call("Client_BufferFromHostBuffer", asked)
        if made.done:
            self.wait(made.done)
        return made.buffer

    def wait(self, event):
        try:
            self.call("Event_Await", _Event(event=event))
        finally:
            self.call("Event_Destroy", _Event(event=event))

    def free(self, buffer):
        self.call("Buffer_Destroy", _Buffer(buffer=buffer))


class Executable:
    def __init__(self, plugin, loaded):
        self._plugin, self._loaded = plugin, loaded
        executable = plugin.call("LoadedExecutable_GetExecutable", _Loaded(loaded=loaded)).executable
        self.outputs = plugin.call("Executable_NumOutputs", _Outputs(executable=executable)).count
        plugin.call("Executable_Destroy", _One(of=executable))
        self._options = _Options()
        self._options.struct_size = ctypes.sizeof(_Options)

    def prepare(self, buffers, taken=()):
        """A function that runs it once on these buffers, and the buffers as it will find them. What it
        returns are the results, as an array, and an event that tells when they are there; both are the
        caller's. Of the buffers, those `taken` (by their places) become results, and are gone after that."""
        arguments = (c_void_p * max(len(buffers), 1))(*buffers)
        lists = (c_void_p * 1)(ctypes.addressof(arguments))
        # Any other is not to be overwritten, whatever the program says.
        others = [at for at in range(len(buffers)) if at not in taken]
        kept = (c_int64 * max(len(others), 1))(*others)
        options = _Options(kept=ctypes.addressof(kept), num_kept=len(others))
        options.struct_size = ctypes.sizeof(_Options)

        def run(keep=(arguments, lists, kept, options)):
            outputs = (c_void_p * max(self.outputs, 1))()
            output_lists = (c_void_p * 1)(ctypes.addressof(outputs))
            events = (c_void_p * 1)()
            asked = _Execute(
                executable=self._loaded,
                options=ctypes.pointer(options),
                arguments=ctypes.addressof(lists),
                num_devices=1,
                num_arguments=len(buffers),
                outputs=ctypes.addressof(output_lists),
                events=ctypes.addressof(events),
            )
            self._plugin.call("LoadedExecutable_Execute", asked)
            return outputs, events[0]

        return run, arguments

    def close(self):
        if self._loaded:
            self._plugin.call("LoadedExecutable_Destroy", _One(of=self._loaded))
            self._loaded = None
