"""The cold half of the binding: ctl files as bytes, for create, gc and the inspectors, in any process.

Nothing here needs a process slot or changes an arena; what must be consistent works on a private copy.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AsString, PyBytes_FromStringAndSize
from libc.string cimport memcpy, memset
from shmrl.arena.core cimport *


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
               uint32_t table_step, bint huge, uint64_t orphan_ttl_ns, bytes run_id, bytes spill_dir):
    """Writes the header of a new ctl file (any writable buffer of 4,096 bytes or more), its magic last."""
    cdef Py_buffer raw
    cdef srl_header given
    memset(&given, 0, sizeof(given))
    memcpy(given.id, PyBytes_AsString(ident), 16)
    memcpy(given.run_id, PyBytes_AsString(run_id), min(len(run_id), 63))
    memcpy(given.spill_dir, PyBytes_AsString(spill_dir), min(len(spill_dir), SRL_SPILL_DIR_MAX - 1))
    given.node, given.boot, given.max_processes, given.table_step = node, boot, max_processes, table_step
    given.huge, given.orphan_ttl_ns = huge, orphan_ttl_ns
    PyObject_GetBuffer(buffer, &raw, PyBUF_WRITABLE)
    srl_format(raw.buf, capacity, &given)
    PyBuffer_Release(&raw)


def spill_dir_of(bytes head):
    """The spill directory named in the first 4,096 bytes of a ctl file; "" if none, or of another version."""
    cdef const srl_header *h = <const srl_header *> PyBytes_AsString(head)
    if len(head) < <Py_ssize_t> sizeof(srl_header) or h.magic != SRL_MAGIC or h.version != SRL_VERSION:
        return ""
    return (<bytes> h.spill_dir[:SRL_SPILL_DIR_MAX]).split(b"\0", 1)[0].decode(errors="replace")


cdef class Ctl:
    """A mapped ctl, of a live or dead arena, or a copy of one; `buffer` stays exported while this lives.

    ForeignArena (another version of the layout), ArenaCorrupt.
    """
    cdef srl_arena a
    cdef Py_buffer raw
    cdef bint open

    def __init__(self, buffer):
        PyObject_GetBuffer(buffer, &self.raw, PyBUF_SIMPLE)
        self.open = True
        open_ctl(&self.a, self.raw.buf, self.raw.len)

    def close(self):
        """Lets go of the buffer."""
        if self.open:
            self.open = False
            PyBuffer_Release(&self.raw)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()

    def __dealloc__(self):
        self.close()

    def read(self):
        """(header, counters, descriptors, processes): dicts of what people ask for, and copies of the raw tables."""
        cdef srl_stats s
        cdef srl_header *h = self.a.h
        srl_get_stats(&self.a, &s)
        head = dict(run_id=h.run_id[:64].split(b"\0", 1)[0].decode(errors="replace"), node=h.node, boot=h.boot,
                    created_ns=h.created_ns, max_processes=self.a.max_processes)
        blocks = PyBytes_FromStringAndSize(<char *> self.a.blocks, <Py_ssize_t> (srl_table_used(&self.a) * 256))
        processes = PyBytes_FromStringAndSize(<char *> self.a.processes, self.a.max_processes * 128)
        return head, counters(&s), blocks, processes

    def lock_owner(self):
        """Process that has the allocator's lock, or None."""
        owner = srl_lock_owner(&self.a)
        return owner if owner < self.a.max_processes else None

    def copy(self, target):
        """Copies what is in use into a zeroed, writable buffer of the same size -> whether it is of one moment.

        It is when nobody had the allocator's lock meanwhile: then the allocator's totals in the copy must be right.
        """
        cdef Py_buffer to
        cdef uint64_t before = self.a.h.lock, pages = <char *> self.a.pages - <char *> self.raw.buf
        cdef uint64_t blocks = <char *> self.a.blocks - <char *> self.raw.buf
        cdef uint64_t head = pages + srl_committed_pages(&self.a) * sizeof(srl_page)
        cdef uint64_t table = srl_table_used(&self.a) * sizeof(srl_block)
        PyObject_GetBuffer(target, &to, PyBUF_WRITABLE)
        try:
            if to.len < self.raw.len:
                raise ValueError(f"{to.len} bytes for a ctl of {self.raw.len}")
            memcpy(to.buf, self.raw.buf, head)
            memcpy(<char *> to.buf + blocks, self.a.blocks, table)
        finally:
            PyBuffer_Release(&to)
        return before == self.a.h.lock and self.lock_owner() is None

    def rebuild(self):
        """On a copy: makes the allocator's maps from the descriptors, as a takeover would -> whether they allow it."""
        return srl_rebuild(&self.a) == 0

    def fsck(self):
        """On a copy: every invariant -> one line per fault."""
        cdef bytes text = PyBytes_FromStringAndSize(NULL, 65536)
        found = srl_fsck(&self.a, PyBytes_AsString(text), 65536)
        return fault_lines(text, found)

    def events(self, uint64_t first):
        """(number, kind, process, at_ns, slot, generation, detail) from number `first` on, as far as they are kept."""
        cdef bytes room = PyBytes_FromStringAndSize(NULL, SRL_EVENTS * sizeof(srl_event))
        cdef srl_event *e = <srl_event *> PyBytes_AsString(room)
        return [(e[i].mark >> 16, e[i].mark >> 8 & 255, e[i].mark & 255, e[i].at_ns, e[i].block & 0xffffffff,
                 e[i].block >> 32, e[i].detail) for i in range(srl_events_since(&self.a, first, e))]
