"""The cold half of the binding: ctl files as bytes, for create, statistics and the inspectors, in any process.

Nothing here needs a process slot, takes the allocator's lock or changes an arena: it reads a mapping that may be
read-only, beside whoever writes. A row is of one moment, and so are a table's sums and the counters beside it.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AsString, PyBytes_FromStringAndSize
from libc.errno cimport ENOBUFS
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, memset
from shmrl.arena.core cimport *

from shmrl.arena.table import BY, FLAGS_OF, STATES
from shmrl.types import HANDLE_VERSION


def crc32c(data, crc=0):
    """crc32c of a buffer, continued from `crc`. crc32c(b"123456789") == 0xe3069283."""
    cdef Py_buffer source
    PyObject_GetBuffer(data, &source, PyBUF_SIMPLE)
    try:
        return srl_crc32c(crc, source.buf, source.len)
    finally:
        PyBuffer_Release(&source)


def crc_blocks(data, uint64_t step):
    """crc32c of every `step` bytes of a buffer -> little-endian uint32 of each, as bytes."""
    cdef Py_buffer source
    PyObject_GetBuffer(data, &source, PyBUF_SIMPLE)
    cdef bytes out = PyBytes_FromStringAndSize(NULL, (source.len + step - 1) // step * 4)
    cdef uint32_t *to = <uint32_t *> PyBytes_AsString(out)
    with nogil:
        srl_crc_blocks(source.buf, source.len, step, to)
    PyBuffer_Release(&source)
    return out


def ctl_nbytes(capacity):
    """Size of the ctl file of an arena of this capacity, and how much of it is committed before anything else."""
    blocks = srl_max_blocks(capacity)
    return srl_ctl_size(capacity, blocks), srl_ctl_fixed_size(blocks)


def format_ctl(buffer, uint64_t capacity, bytes ident, uint32_t node, uint32_t boot, uint32_t max_processes,
               uint32_t table_step, bint huge, uint64_t orphan_ttl_ns, bytes run_id, bytes spill_dir, dict shares):
    """Writes the header of a new ctl file (any writable buffer of 4,096 bytes or more), its magic last.

    shares: bytes by source; what they leave of the capacity is the share of all others. {}: there are none.
    """
    cdef Py_buffer raw
    cdef srl_header given
    memset(&given, 0, sizeof(given))
    memcpy(given.id, PyBytes_AsString(ident), 16)
    memcpy(given.run_id, PyBytes_AsString(run_id), min(len(run_id), 63))
    memcpy(given.spill_dir, PyBytes_AsString(spill_dir), min(len(spill_dir), SRL_SPILL_DIR_MAX - 1))
    given.node, given.boot, given.max_processes, given.table_step = node, boot, max_processes, table_step
    given.huge, given.orphan_ttl_ns = huge, orphan_ttl_ns
    cdef bytes name
    if shares:
        given.share_count = 1
        given.shares[0].guaranteed = capacity - <uint64_t> sum(shares.values())
    for source, nbytes in shares.items():
        name = source.encode()
        memcpy(given.shares[given.share_count].name, PyBytes_AsString(name), min(len(name), SRL_SHARE_NAME - 1))
        given.shares[given.share_count].guaranteed = nbytes
        given.share_count += 1
    PyObject_GetBuffer(buffer, &raw, PyBUF_WRITABLE)
    srl_format(raw.buf, capacity, &given)
    PyBuffer_Release(&raw)


def spill_dir_of(bytes head):
    """The spill directory named in the first 4,096 bytes of a ctl file; "" if none, or of another version."""
    cdef srl_header h  # a copy: bytes are not aligned as a header has to be
    if len(head) < <Py_ssize_t> sizeof(h):
        return ""
    memcpy(&h, PyBytes_AsString(head), sizeof(h))
    if h.magic != SRL_MAGIC or h.version != SRL_VERSION:
        return ""
    return text_of(h.spill_dir, SRL_SPILL_DIR_MAX)


cdef class Ctl:
    """A mapped ctl, of a live or dead arena; `buffer` stays exported while this lives, and `data`, if it is given.

    ForeignArena (another version of the layout), ArenaCorrupt.
    """
    cdef srl_arena a
    cdef Py_buffer raw, data
    cdef bint open, has_data

    def __init__(self, buffer, data=None):
        PyObject_GetBuffer(buffer, &self.raw, PyBUF_SIMPLE)
        self.open = True
        open_ctl(&self.a, self.raw.buf, self.raw.len)
        if data is not None:
            PyObject_GetBuffer(data, &self.data, PyBUF_SIMPLE)
            self.has_data = True

    def close(self):
        """Lets go of the buffers."""
        if self.open:
            self.open = False
            PyBuffer_Release(&self.raw)
        if self.has_data:
            self.has_data = False
            PyBuffer_Release(&self.data)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()

    def __dealloc__(self):
        self.close()

    def head(self):
        """What does not change: run_id, node, boot, created_ns, max_processes."""
        cdef srl_header *h = self.a.h
        return dict(run_id=text_of(h.run_id, sizeof(h.run_id)), node=h.node, boot=h.boot, created_ns=h.created_ns,
                    max_processes=self.a.max_processes)

    def processes(self):
        """A copy of the process table's bytes."""
        return PyBytes_FromStringAndSize(<char *> self.a.processes, self.a.max_processes * sizeof(srl_process))

    def shares(self):
        """(source, bytes guaranteed, bytes used) of each share, the unnamed one first, as ""; [] without shares."""
        cdef srl_share *s = self.a.h.shares
        return [(text_of(s[i].name, SRL_SHARE_NAME), s[i].guaranteed, s[i].used) for i in range(self.a.shares)]

    def count(self, *by):
        """(counters, {by: {key: (blocks, bytes)}}) of one walk, so that the bytes of each table sum to used_bytes.

        Keys: of source and field text, of step and holder (a process index) an integer or None, of age an index.
        """
        cdef srl_stats s
        cdef uint32_t room = 256
        while True:
            tables = self._count(&s, by, room)
            if tables is not None:
                return counters(&s), tables
            room *= 4

    cdef dict _count(self, srl_stats *s, tuple by, uint32_t room):
        """None when a table has more groups than half of `room`."""
        cdef srl_walk walk
        cdef int rc = 0
        cdef unsigned i
        memset(&walk, 0, sizeof(walk))
        walk.tallies = len(by)
        if self.has_data and self.data.len >= <Py_ssize_t> self.a.max_pages * SRL_PAGE:
            walk.data = <const uint8_t *> self.data.buf
        try:
            for i in range(walk.tallies):
                walk.tally[i].by, walk.tally[i].room = BY.index(by[i]), room
                walk.tally[i].groups = <srl_group *> calloc(room, sizeof(srl_group))
                if walk.tally[i].groups == NULL:
                    raise MemoryError(f"no memory for {room} groups by {by[i]}")
            with nogil:
                rc = srl_count(&self.a, s, &walk)
            return None if rc == -ENOBUFS else {by[i]: groups_of(&walk.tally[i]) for i in range(walk.tallies)}
        finally:
            for i in range(walk.tallies):
                free(walk.tally[i].groups)

    def rows(self, names, slots=None):
        """Blocks as Arena.ls() has them, in the order of `slots`, else all; each as it was at one moment.

        names: table.Names. What is free when its turn comes is left out.
        """
        cdef srl_block b
        cdef uint64_t slot
        cdef uint8_t handle[32]
        cdef dict processes = names.processes
        cdef int64_t now_ns = names.now_ns
        memset(handle, 0, sizeof(handle))
        handle[0] = HANDLE_VERSION
        memcpy(handle + 2, &self.a.h.node, 4)
        memcpy(handle + 6, self.a.h.id, 4)
        for slot in range(srl_table_used(&self.a)) if slots is None else slots:
            if srl_look_at(&self.a, slot, &b):
                yield row_of(slot, &b, handle, processes, now_ns)

    def select(self, order=None, *, unsigned states=14, unsigned flags=0, source=None, step=None, processes=None):
        """(keys, slots) of blocks, in slot order; keys are what `order` sorts by: "size", "age" (birth) or "tag".

        states: a bit per state; flags: all of these; processes: a bit per index, of the owner or a reader.
        """
        cdef srl_block b
        cdef uint64_t slot
        cdef bytes wanted = source
        keys, slots = [], []
        for slot in range(srl_table_used(&self.a)):
            if not srl_look_at(&self.a, slot, &b) or not states >> (b.word >> 28 & 15) & 1:
                continue
            if (b.word >> 16 & flags) != flags or (step is not None and b.step != step):
                continue
            if wanted is not None and source_of(&b) != wanted:
                continue
            if processes is not None and not bits_of(&b) & processes:
                continue
            slots.append(slot)
            if order is not None:
                keys.append(key_of(&b, order))
        return keys, slots

    def suspects(self, int64_t step, dead):
        """(births, slots) of blocks shipped before `step`, orphaned, or with a dead process.

        dead: a bit per process index.
        """
        cdef srl_block b
        cdef uint64_t slot
        births, slots = [], []
        for slot in range(srl_table_used(&self.a)):
            if not srl_look_at(&self.a, slot, &b):
                continue
            if 0 <= b.step < step or b.word >> 16 & SRL_ORPHAN or (dead and bits_of(&b) & dead):
                births.append(b.birth_ns)
                slots.append(slot)
        return births, slots

    def orphans(self):
        """{"name (pid)" of who left them: (blocks, bytes)} of the orphans; "others": their places are taken again."""
        cdef srl_block b
        cdef srl_process *p
        cdef dict out = {}
        cdef uint64_t slot
        for slot in range(srl_table_used(&self.a)):
            if srl_look_at(&self.a, slot, &b) and b.word >> 16 & SRL_ORPHAN:
                p = self.a.processes + (b.word & 255)
                known = p.since_ns and p.since_ns <= b.orphan_ns
                name = f"{text_of(p.name, sizeof(p.name))} ({p.pid})" if known else "others"
                blocks, nbytes = out.get(name, (0, 0))
                out[name] = blocks + 1, nbytes + b.span
        return out

    def lock_word(self):
        """The allocator's lock: every acquisition changes it."""
        return self.a.h.lock

    def lock_owner(self):
        """Process that has the allocator's lock, or None."""
        owner = srl_lock_owner(&self.a)
        return owner if owner < self.a.max_processes else None

    def rebuild(self):
        """On a private mapping: makes the allocator's maps from the descriptors -> whether they allow it."""
        return srl_rebuild(&self.a) == 0

    def fsck(self):
        """Every invariant -> one line per fault; the allocator's totals are only right while nobody has its lock."""
        cdef bytes text = PyBytes_FromStringAndSize(NULL, 65536)
        cdef char *to = PyBytes_AsString(text)
        with nogil:
            found = srl_fsck(&self.a, to, 65536)
        return fault_lines(text, found)

    def events(self, uint64_t first):
        """(number, kind, process, at_ns, slot, generation, detail) from number `first` on, as far as they are kept."""
        cdef bytes room = PyBytes_FromStringAndSize(NULL, SRL_EVENTS * sizeof(srl_event))
        cdef srl_event *e = <srl_event *> PyBytes_AsString(room)
        return [(e[i].mark >> 16, e[i].mark >> 8 & 255, e[i].mark & 255, e[i].at_ns, e[i].block & 0xffffffff,
                 e[i].block >> 32, e[i].detail) for i in range(srl_events_since(&self.a, first, e))]


cdef dict row_of(uint64_t slot, const srl_block *b, uint8_t *handle, dict processes, int64_t now_ns):
    """Of nothing but strings, numbers and tuples of them: 64k such dicts are no work for the garbage collector."""
    cdef uint64_t generation = b.word >> 32, flags = b.word >> 16 & 31
    memcpy(handle + 10, &slot, 4)
    memcpy(handle + 14, &generation, 4)
    memcpy(handle + 18, &b.nbytes, 6)
    memcpy(handle + 24, &b.nonce, 8)
    return {
        "handle": "h" + (<char *> handle)[:32].hex(),
        "slot": slot,
        "generation": generation,
        "state": STATES[b.word >> 28 & 15],
        "flags": FLAGS_OF[flags],
        "owner": None if flags & SRL_ORPHAN else name_of(b.word & 0xffff, processes),
        "nbytes": b.nbytes,
        "span_bytes": b.span,
        "tag": text_of(b.tag, sizeof(b.tag)),
        "readers": b.readers,
        "done": indices(b.done),
        "held_by": tuple([name_of(index, processes) for index in indices(b.holders)]),
        "step": None if b.step < 0 else b.step,
        "age_s": max(0, now_ns - <int64_t> b.birth_ns) // 1_000_000 / 1000,
    }


cdef object name_of(index, dict processes):
    return processes.get(index) or f"process {index}"


cdef tuple indices(const uint64_t *bits):
    """Of the set bits, of 256."""
    if not (bits[0] | bits[1] | bits[2] | bits[3]):
        return ()
    return tuple([i for i in range(256) if bits[i >> 6] >> (i & 63) & 1])


cdef object bits_of(const srl_block *b):
    """Owner and readers as one integer."""
    readers = <object> b.holders[0] | <object> b.holders[1] << 64 | <object> b.holders[2] << 128 \
        | <object> b.holders[3] << 192
    return readers if b.word >> 16 & SRL_ORPHAN else readers | 1 << (b.word & 0xffff)


cdef bytes source_of(const srl_block *b):
    """Second component of the tag."""
    parts = b.tag[:strnlen(b.tag, sizeof(b.tag))].split(b"/", 2)
    return parts[1] if len(parts) > 1 else b""


cdef object key_of(const srl_block *b, str order):
    if order == "size":
        return b.span or b.nbytes  # one that was spilled takes nothing of the arena
    return b.birth_ns if order == "age" else b.tag[:strnlen(b.tag, sizeof(b.tag))]


cdef dict groups_of(const srl_tally *t):
    out = {}
    cdef const srl_group *g
    cdef int64_t number
    for i in range(t.room):
        g = &t.groups[i]
        if not g.taken:
            continue
        if t.by in (SRL_BY_SOURCE, SRL_BY_FIELD):
            key = g.key[:g.len].decode("utf-8", "replace")
        else:
            memcpy(&number, g.key, 8)
            key = None if number < 0 or (t.by == SRL_BY_HOLDER and number == SRL_NONE) else number
        blocks, nbytes = out.get(key, (0, 0))  # two keys may decode to one text
        out[key] = blocks + g.blocks, nbytes + g.bytes
    return out


cdef dict counters(srl_stats *s):
    """The pinned keys of stats()."""
    return dict(blocks=s.blocks, used_bytes=s.used_bytes, peak_bytes=s.peak_bytes, committed_bytes=s.committed_bytes,
                capacity_bytes=s.capacity_bytes, created=s.created, freed=s.freed, orphaned=s.orphaned,
                orphaned_bytes=s.orphaned_bytes, spilled=s.spilled, spilled_bytes=s.spilled_bytes, waits=s.waits)


cdef list fault_lines(bytes text, int found):
    """What srl_fsck() wrote, and how many more there were than it had room for."""
    lines = text_of(text, len(text)).splitlines()
    return lines if len(lines) == found else [*lines, f"... {found} faults in all"]
