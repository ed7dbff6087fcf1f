"""The caching allocator the slow way: plain lists, every question answered by looking at everything.

Written from PyTorch's behaviour, not from csrc/predict, so that the two can disagree.
"""

import math

MIB = 1 << 20


class Piece:
    def __init__(self, address, size, mapped=True):
        self.address, self.size, self.mapped = address, size, mapped
        self.state, self.requested, self.since = "free", 0, 0


class Oracle:
    """Segments are lists of pieces; every question is answered by looking at all of them."""

    def __init__(
        self, total=None, split=None, rounding=20 * MIB, divisions=None, expandable=False, threshold=0.0, allowed=None
    ):
        self.total, self.allowed, self.split, self.rounding = total, allowed, split or math.inf, rounding
        self.divisions, self.expandable, self.threshold = divisions or [0] * 16, expandable, threshold
        self.segments = []  # dicts: base, size, stream, small, pieces
        self.next, self.events, self.pending = 0x7F0000000000, [], []
        self.searches = {True: 0, False: 0}
        self.peak = {}
        self.retries = self.ooms = self.device_calls = 0

    def round(self, n):
        if n < 512:
            return 512
        log2 = n.bit_length() - 1
        d = self.divisions[min(max(log2 - 20, 0), 15)]
        step = (1 << log2) // d if d > 1 and n > 512 * d else 512
        return -(-n // step) * step

    def pieces(self):
        return [(s, p) for s in self.segments for p in s["pieces"]]

    def cached(self, small):
        found = [(s["stream"], p.size, p.address, s, p) for s, p in self.pieces() if s["small"] == small]
        return sorted((f for f in found if f[4].state == "free" and f[4].mapped), key=lambda f: f[:3])

    def figures(self):
        live = [p for _, p in self.pieces() if p.state == "live"]
        active = [p for _, p in self.pieces() if p.state != "free"]
        idle = [p for s, p in self.pieces() if p.state == "free" and len(s["pieces"]) > 1 and not self.expandable]
        return {
            "allocation": len(live),
            "allocated_bytes": sum(p.size for p in live),
            "active": len(active),
            "active_bytes": sum(p.size for p in active),
            "requested_bytes": sum(p.requested for p in active),
            "inactive_split": len(idle),
            "inactive_split_bytes": sum(p.size for p in idle),
            "reserved_bytes": sum(p.size for _, p in self.pieces() if p.mapped),
            "segment": 0 if self.expandable else len(self.segments),
        }

    def note(self, *event):
        if event:
            self.events.append(event)
        for key, value in self.figures().items():
            self.peak[key] = max(self.peak.get(key, 0), value)

    def reserved(self):
        return sum(p.size for _, p in self.pieces() if p.mapped)

    def new_segment(self, size, stream, small, mapped=True):
        segment = {"base": self.next, "size": size, "stream": stream, "small": small}
        segment["pieces"] = [Piece(self.next, size, mapped)]
        self.next += -(-size // (2 * MIB)) * 2 * MIB
        self.segments.append(segment)
        return segment

    def merge(self, segment, piece):
        """Joins piece with its free neighbours; piece stays the object that stands for the whole."""
        pieces = segment["pieces"]
        for side in (-1, 1):
            i = pieces.index(piece) + side
            if 0 <= i < len(pieces) and pieces[i].state == "free" and pieces[i].mapped == piece.mapped:
                piece.address = min(piece.address, pieces[i].address)
                piece.size += pieces.pop(i).size

    def cache(self, segment, piece):
        piece.since = self.searches[segment["small"]]

    # -- stages of malloc --

    def find(self, size, stream, small):
        if self.allowed and self.threshold:
            self.searches[small] += 1
        fits = [(s, p) for on, n, _, s, p in self.cached(small) if on == stream and n >= size]
        if not fits:
            return None
        if self.expandable:

            def can_be(found):
                pieces = found[0]["pieces"]
                after = pieces[pieces.index(found[1]) + 1 :][:1]
                return found[1].size + sum(p.size for p in after if not p.mapped)

            i = 0
            while i + 1 < len(fits) and can_be(fits[i + 1]) < can_be(fits[i]):
                i += 1
            fits = fits[i:]
        piece = fits[0][1]
        if (size < self.split <= piece.size) or (size >= self.split and piece.size >= size + self.rounding):
            return None
        return fits[0]

    def release(self, segment):
        piece = segment["pieces"][0]
        self.segments.remove(segment)
        self.note("segment_free", piece.address, piece.size, segment["stream"])

    def collect(self):
        threshold = int(self.threshold * self.allowed)
        if self.reserved() <= threshold:
            return
        target, got = self.reserved() - threshold, 0
        while True:
            whole = [(s, self.searches[False] - p.since) for *_, s, p in self.cached(False) if len(s["pieces"]) == 1]
            if self.expandable or not whole or got >= target:
                return
            mean = sum(age for _, age in whole) / len(whole)
            for segment, age in whole:
                if age >= mean:
                    got += segment["size"]
                    self.release(segment)

    def release_oversized(self, size, stream, small):
        if self.split == math.inf or self.expandable:
            return False
        want = max(size, self.split)
        large = [s for on, n, _, s, p in self.cached(small) if on == stream and n >= self.split]
        enough = [s for s in large if s["size"] >= want]
        if enough:
            self.release(enough[0])
            return True
        got = 0
        for segment in reversed(large):
            if got >= want:
                break
            got += segment["size"]
            self.release(segment)
        return got >= want

    def release_all(self):
        while self.pending:
            self.complete(self.pending[-1])
        for small in (False, True):
            for *_, segment, piece in self.cached(small):
                if self.expandable:
                    self.unmap(segment, piece)
                elif len(segment["pieces"]) == 1:
                    self.release(segment)

    def new(self, size, stream, small):
        wanted = 2 * MIB if small else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
        if self.allowed and self.reserved() + wanted > self.allowed:
            return None
        if self.expandable:
            return self.grow(size, stream, small)
        if self.total and self.reserved() + wanted > self.total:
            return None
        segment = self.new_segment(wanted, stream, small)
        self.device_calls += 1
        self.note("segment_alloc", segment["base"], wanted, stream)
        return segment, segment["pieces"][0]

    # -- expandable segments --

    def map(self, segment, piece, size):
        page = 2 * MIB if segment["small"] else 20 * MIB
        n = -(-size // page) * page
        if self.total and self.reserved() + n > self.total:
            return False
        address, pieces = piece.address, segment["pieces"]
        if n < piece.size:
            pieces.insert(pieces.index(piece) + 1, Piece(address + n, piece.size - n, False))
            piece.size = n
        piece.mapped = True
        self.merge(segment, piece)
        self.cache(segment, piece)
        self.device_calls += 1
        self.note("segment_map", address, n, segment["stream"])
        return True

    def unmap(self, segment, piece):
        page, base, pieces = (2 if segment["small"] else 20) * MIB, segment["base"], segment["pieces"]
        start, end = piece.address, piece.address + piece.size
        low, high = base + -(-(start - base) // page) * page, base + (end - base) // page * page
        if low >= high:
            return
        i = pieces.index(piece)
        middle = Piece(low, high - low, False)
        parts = [Piece(start, low - start), middle, Piece(high, end - high)]
        pieces[i : i + 1] = [p for p in parts if p.size]
        for p in pieces[i : i + 3]:
            self.cache(segment, p)
        self.merge(segment, middle)
        self.note("segment_unmap", low, high - low, segment["stream"])
        if len(pieces) == 1:
            self.segments.remove(segment)

    def grow(self, size, stream, small):
        mine = [s for s in self.segments if (s["stream"], s["small"]) == (stream, small)]
        start = None
        for segment in sorted(mine, key=lambda s: s["base"]):
            pieces = segment["pieces"]
            for i, piece in enumerate(pieces):
                if piece.mapped or start:
                    continue
                first = i - 1 if i and pieces[i - 1].state == "free" else i
                room = 0
                for p in pieces[first:]:
                    if p.state != "free" or room >= size:
                        break
                    room += p.size
                if room >= size:
                    start = segment, pieces[first]
        if not start:
            page = 2 * MIB if small else 20 * MIB
            span = self.total + self.total // 8 if self.total else 1 << 40
            segment = self.new_segment(-(-span // page) * page, stream, small, mapped=False)
            start = segment, segment["pieces"][0]
        segment, piece = start
        if not piece.mapped and not self.map(segment, piece, min(size, piece.size)):
            return None
        while piece.size < size:
            following = segment["pieces"][segment["pieces"].index(piece) + 1]
            if not self.map(segment, following, min(following.size, size - piece.size)):
                return None
            piece = following
        return segment, piece

    # -- what callers use --

    def malloc(self, n, stream=0):
        if not n:
            return 0
        size = self.round(n)
        small = size <= MIB
        found = self.find(size, stream, small)
        if not found:
            if self.allowed and self.threshold:
                self.collect()
            found = self.new(size, stream, small)
        if not found and self.release_oversized(size, stream, small):
            found = self.new(size, stream, small)
        if not found:
            self.release_all()
            self.retries += 1
            found = self.new(size, stream, small)
        if not found:
            self.ooms += 1
            self.note("oom", max(0, (self.total or 0) - self.reserved()), size, stream)
            raise MemoryError
        segment, piece = found
        rest = piece.size - size
        if rest >= 512 if small or self.expandable else size < self.split and rest > MIB:
            pieces = segment["pieces"]
            tail = Piece(piece.address + size, rest)
            pieces.insert(pieces.index(piece) + 1, tail)
            self.cache(segment, tail)
            piece.size = size
        piece.state, piece.requested = "live", n
        self.note("alloc", piece.address, n, stream)
        return piece.address

    def at(self, address):
        return next((s, p) for s, p in self.pieces() if p.address == address and p.state != "free")

    def free(self, address, pending=False):
        segment, piece = self.at(address)
        if piece.state == "live":
            piece.state = "pending"
            self.pending.append(address)
            self.note("free_requested", address, piece.requested, segment["stream"])
        if not pending:
            self.complete(address)

    def complete(self, address):
        self.pending.remove(address)
        segment, piece = self.at(address)
        requested, piece.state, piece.requested = piece.requested, "free", 0
        self.merge(segment, piece)
        self.cache(segment, piece)
        self.note("free_completed", address, requested, segment["stream"])

    def reset_peak(self):
        self.peak = self.figures()
