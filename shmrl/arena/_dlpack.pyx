# cython: binding=False
"""DLPack capsules over read-only bytes, as the array API standard's `__dlpack__` hands them out. For `View` alone.

Runs in any attached process. A capsule holds a buffer of the view, as a memoryview does: it counts as an export until
its consumer calls the deleter, in whatever thread, or until nobody consumed it and it is dropped. Structs are DLPack's
C ABI, version 1.0.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.pycapsule cimport PyCapsule_GetPointer, PyCapsule_IsValid, PyCapsule_New
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy
from posix.stdlib cimport posix_memalign

cdef extern from "Python.h" nogil:
    int Py_IsInitialized()

cdef enum:
    CPU = 1          # kDLCPU
    UNSIGNED = 1     # kDLUInt
    READ_ONLY = 1    # flags
    IS_COPIED = 2
    ALIGNMENT = 256  # of memory that a producer allocates

cdef struct Device:
    int32_t type, id

cdef struct Tensor:
    void *data
    Device device
    int32_t ndim
    uint8_t code, bits
    uint16_t lanes
    int64_t *shape
    int64_t *strides
    uint64_t byte_offset

cdef struct Legacy:
    Tensor tensor
    void *exported
    void (*deleter)(Legacy *) noexcept nogil

cdef struct Versioned:
    uint32_t major, minor
    void *exported
    void (*deleter)(Versioned *) noexcept nogil
    uint64_t flags
    Tensor tensor

cdef struct Exported:
    Versioned versioned
    Legacy legacy
    int64_t shape, stride
    void *copied      # memory of its own, or NULL and
    Py_buffer buffer  # the view's

UNSAID = object()
"""Default of `copy`: a consumer that does not say whether it wants one."""


def capsule(view, stream, max_version, dl_device, copy):
    """The capsule of uint8 [nbytes]: the memory itself, marked read-only, or with copy=True writable memory of its own.

    A consumer that leaves `copy` unsaid, as torch's does, gets a copy: torch 2.13 takes read-only memory for writable.
    NumPy names `copy` and `dl_device` and heeds the mark. BufferError for another device, for an uncopied capsule
    without the mark (max_version below 1.0), and for copy=False of a consumer that names no device; ValueError for a
    stream.
    """
    if stream is not None:
        raise ValueError(f"stream={stream!r}: memory of the host has none")
    if dl_device is not None and tuple(dl_device) != (CPU, 0):
        raise BufferError(f"dl_device={dl_device!r}: a view is memory of the host, (1, 0)")
    marked = max_version is not None and max_version[0] >= 1
    if not marked and copy is not True:
        raise BufferError("a view is read-only, which DLPack can say from 1.0 on: "
                          f"max_version={max_version!r} takes copy=True")
    if copy is False and dl_device is None:
        raise BufferError("a view is read-only, and a consumer that names no dl_device is taken for one that would "
                          "write to it (torch): leave out copy=False")
    cdef Exported *e = export(view, copy is True or copy is UNSAID)
    if marked:
        return PyCapsule_New(&e.versioned, "dltensor_versioned", drop_versioned)
    return PyCapsule_New(&e.legacy, "dltensor", drop_legacy)


cdef Exported *export(object view, bint copied) except NULL:
    cdef Exported *e = <Exported *> calloc(1, sizeof(Exported))
    if e == NULL:
        raise MemoryError()
    try:
        PyObject_GetBuffer(view, &e.buffer, PyBUF_SIMPLE)
    except BaseException:
        free(e)
        raise
    e.shape, e.stride = e.buffer.len, 1
    if copied and not own(e):
        nbytes = e.shape
        forget(e)
        raise MemoryError(f"no memory for a copy of {nbytes} bytes")
    describe(e)
    return e


cdef bint own(Exported *e) noexcept:
    """Replaces the view's memory by a copy."""
    if posix_memalign(&e.copied, ALIGNMENT, max(e.shape, 1)):
        e.copied = NULL
        return False
    memcpy(e.copied, e.buffer.buf, e.shape)
    PyBuffer_Release(&e.buffer)
    return True


cdef void describe(Exported *e) noexcept:
    cdef Tensor *t = &e.versioned.tensor
    t.data = e.copied if e.copied != NULL else e.buffer.buf
    t.device.type, t.ndim = CPU, 1
    t.code, t.bits, t.lanes = UNSIGNED, 8, 1
    t.shape, t.strides = &e.shape, &e.stride
    e.versioned.major = 1
    e.versioned.flags = IS_COPIED if e.copied != NULL else READ_ONLY
    e.versioned.exported = e.legacy.exported = e
    e.versioned.deleter, e.legacy.deleter = forget_versioned, forget_legacy
    e.legacy.tensor = e.versioned.tensor


cdef void forget(Exported *e) noexcept nogil:
    """In any thread, with or without the interpreter's lock; after its end the kernel lets go of what it held."""
    if e.copied != NULL:
        free(e.copied)
    elif Py_IsInitialized():
        with gil:
            PyBuffer_Release(&e.buffer)
    free(e)


cdef void forget_versioned(Versioned *v) noexcept nogil:
    forget(<Exported *> v.exported)


cdef void forget_legacy(Legacy *v) noexcept nogil:
    forget(<Exported *> v.exported)


# A consumer renames the capsule when it takes over; one that kept its name was consumed by nobody.

cdef void drop_versioned(object self) noexcept:
    if PyCapsule_IsValid(self, "dltensor_versioned"):
        forget_versioned(<Versioned *> PyCapsule_GetPointer(self, "dltensor_versioned"))


cdef void drop_legacy(object self) noexcept:
    if PyCapsule_IsValid(self, "dltensor"):
        forget_legacy(<Legacy *> PyCapsule_GetPointer(self, "dltensor"))
