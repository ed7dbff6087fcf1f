"""A script that is played on a simulated device while it is written: the core's objects without their wrapper."""

import numpy as np

from vaemem import _core


class Playing:
    """Each method writes an event, and plays it. `script` and `play` are the core's objects."""

    def __init__(self, allocator, cublas_bytes=8 << 20, cublaslt_bytes=1 << 20, cublaslt_use="each"):
        self.script, memory = _core.Script(), allocator._settings()["total_memory"]
        self.play = _core.Play(self.script, allocator, memory, cublas_bytes, cublaslt_bytes, cublaslt_use)
        self.play.note_heights(True)

    def __getattr__(self, name):
        return getattr(self.script if name in ("names", "convs", "events", "bytes_of", "phases") else self.play, name)

    def take(self, *given):
        taken = self.script.take(*given)
        self.play.follow()
        return taken

    def replace(self, stamp, storages, sizes):
        """Put the new storages into the list, also if memory runs out."""
        old = list(storages)
        storages[:] = self.script.replace(stamp, storages, sizes)
        try:
            self.play.follow()
        except MemoryError:
            storages[:] = [a if self.bytes_of(a) else b for a, b in zip(storages, old, strict=True)]
            raise

    def give(self, storages):
        self.script.give(storages)
        self.play.follow()

    def call(self, *given):
        """({id: handle} of what stays, bytes allocated and reserved at each step's height)."""
        return self.play.call(*given), *(np.array(one.tolist(), np.uint64) for one in self.play.heights)

    def empty_cache(self):
        self.script.empty_cache()
        self.play.follow()

    def reset_peak(self):
        self.script.reset_peak()
        self.play.follow()

    def count(self, *work):
        self.script.count(*work)

    def times(self, times):
        self.script.times(times)

    def read(self, name):
        self.script.read(name)
        self.play.follow()

    def elsewhere(self, allocator):
        """The same script, played on another device as far as it fits; and the error that ended it."""
        other = self.play.elsewhere(allocator, allocator._settings()["total_memory"])
        try:
            other.run()
        except MemoryError as error:
            return other, error
        return other, None
