"""Several processes on one arena: sharing, who may write, death and standstill, forks, waiting for space."""

import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from shmrl.arena import Arena, Handle
from shmrl.arena.commands import stats
from shmrl.arena.waiting import giving_up
from shmrl.errors import ArenaClosed, ArenaFull, PeerStalled, StaleHandle, TooManyProcesses
from tests.arena.conftest import UNSHARE
from tests.support.clock import wait_until

MIB = 1 << 20


def wait_for(line="go"):
    assert sys.stdin.readline().strip() == line


# ----------------------------------------------------------------------------------------------------- what helpers do


def reader(address, handle):
    """Holds a view until told to go, or for ever."""
    with Arena.attach(address) as arena, arena.get(Handle.parse(handle)) as view:
        print(bytes(memoryview(view)[:4]).decode(), flush=True)
        sys.stdin.readline()


def writer(address, nbytes):
    """One sealed block and one that never will be."""
    with Arena.attach(address) as arena:
        print(arena.put(b"w" * int(nbytes), tag="run/w"), flush=True)
        with arena.reserve(1000):
            sys.stdin.readline()


def permissions(address, handle):
    """How this process maps the data file, before and after its first write."""
    with Arena.attach(address) as arena, arena.get(Handle.parse(handle)) as view:
        before = _data_mapping()
        arena.free(arena.put(b"mine"))
        print(before, _data_mapping(), bytes(view).decode(), flush=True)


def _data_mapping():
    with open("/proc/self/maps") as maps:
        return ",".join(line.split()[1] for line in maps if line.rstrip().endswith(".data"))


def forker(address, handle):
    """Forks a child that tries everything, prints its verdicts, and outlives its parent."""
    arena = Arena.attach(address)
    view = arena.get(Handle.parse(handle))
    pid = os.fork()
    if pid == 0:
        verdicts = []
        for call in (lambda: arena.get(view.handle), lambda: arena.put(b"x"), arena.stats):
            try:
                call()
                verdicts.append("worked")
            except ArenaClosed:
                verdicts.append("closed")
        view.release()  # the parent's hold: must not end here
        arena.close()
        with Arena.attach(address) as own:
            own.free(own.put(b"again"))
            verdicts.append("attached")
        print(os.getpid(), *verdicts, flush=True)
        signal.pause()
    os.waitpid(pid, 0)


def many_puts(address, count, nbytes):
    with Arena.attach(address) as arena:
        for i in range(int(count)):
            print(arena.put(bytes([i % 256]) * int(nbytes), tag="run/flood"), flush=True)
        wait_for()


def waiter(address, nbytes, name):
    """Waits for space, then says its name."""
    with Arena.attach(address) as arena:
        print("waiting", flush=True)
        handle = arena.put(bytes(int(nbytes)), timeout_s=60)
        print(name, flush=True)
        wait_for()
        arena.free(handle)
        print("freed", flush=True)


def lock_hog(address):
    """Has the allocator's lock most of the time: exact statistics over many blocks."""
    with Arena.attach(address) as arena:
        print("hog", flush=True)
        while True:
            arena.stats(by="step", exact=True)


def many_handles(address, count):
    """Keeps `count` blocks of its own with 256 descriptors to live on, and says how many of those it needs."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    with Arena.attach(address) as arena:
        handles = [arena.put(b"x", tag="run/many", checksum=False) for _ in range(int(count))]
        views = arena.get_many(handles)
        print(len(views), len(os.listdir("/proc/self/fd")), flush=True)
        wait_for()
        views.clear()


def whole_reader(address, handle):
    """Reads every byte in place; prints how many KiB of its own memory that took."""
    with Arena.attach(address) as arena:
        before = _anonymous_kib()
        with arena.get(Handle.parse(handle), verify=True):
            print(_anonymous_kib() - before, flush=True)
            wait_for()


def _anonymous_kib():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon"))


def slot_only(address):
    with Arena.attach(address):
        print("attached", flush=True)
        sys.stdin.readline()


# ------------------------------------------------------------------------------------------------------------- sharing


def test_readers_map_the_data_read_only(arena, helper):
    handle = arena.put(b"abcd")
    assert helper(permissions, arena.address, handle).line() == "r--s rw-s abcd"
    arena.free(handle)


def test_attaching_and_leaving_changes_nothing(arena, helper):
    """A reader that exits, by whatever way, neither removes the segments nor says anything on stderr."""
    handle = arena.put(b"abcd")
    for end in ("pass", "sys.exit(3)", "raise RuntimeError('mine')"):
        code = f"import sys; from shmrl import Arena; a = Arena.attach({arena.address!r}); a.close(); {end}"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert "resource_tracker" not in done.stderr
        assert "leaked" not in done.stderr
    with arena.get(handle) as view:
        assert bytes(view) == b"abcd"
    arena.free(handle)


def test_interpreter_exit_with_live_views_is_quiet(arena):
    handle = arena.put(b"abcd" * 1000)
    code = (
        "import sys; from shmrl import Arena, Handle; import numpy as np\n"
        f"a = Arena.attach({arena.address!r}); v = np.frombuffer(a.get(Handle.parse({str(handle)!r})), np.uint8)\n"
        "a.close(); print(v[:4].tobytes())"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "b'abcd'\n", "")
    arena.sweep()
    arena.free(handle)
    assert arena.stats()["blocks"] == 0


def test_importing_the_arena_is_light():
    code = (
        "import sys; import shmrl.arena; print([m for m in ('numpy', 'torch', 'multiprocessing') if m in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_too_many_processes(helper):
    with Arena.create("1MiB", max_processes=2) as arena:
        other = helper(slot_only, arena.address)
        assert other.line() == "attached"
        with pytest.raises(TooManyProcesses):
            Arena.attach(arena.address)
        other.kill()
        Arena.attach(arena.address).close()  # the dead one's slot is swept and taken
        arena.unlink()


def test_a_hundred_thousand_blocks_of_eight_processes_take_no_descriptors(arena, helper):
    """SH-13: 256 descriptors per process are plenty; blocks and views have none."""
    owners = [helper(many_handles, arena.address, 12_500) for _ in range(8)]
    for owner in owners:
        blocks, descriptors = map(int, owner.line().split())
        assert blocks == 12_500
        assert descriptors < 64
    assert arena.stats()["blocks"] == 100_000
    for owner in owners:
        owner.say()
        owner.wait()
    assert arena.discard("run/many") == 100_000


def test_eight_readers_share_one_copy(arena, helper):
    """The block is in memory once, whoever reads it."""
    handle = arena.put(bytes(48 * MIB))
    data = "/dev/shm/shmrl-{}-{}.data".format(os.geteuid(), arena.address.split(":")[1])
    before = os.stat(data).st_blocks
    readers = [helper(whole_reader, arena.address, handle) for _ in range(8)]
    grown_kib = [int(reader.line()) for reader in readers]
    assert sum(grown_kib) < 0.05 * 48 * 1024, grown_kib
    assert os.stat(data).st_blocks == before == 64 * MIB // 512
    for reader in readers:
        reader.say()
        assert reader.wait() == 0
    arena.free(handle)


# --------------------------------------------------------------------------------------------------- death, standstill


def test_a_killed_reader_lets_go(arena, helper):
    handle = arena.put(b"abcd" * 1000)
    other = helper(reader, arena.address, handle)
    assert other.line() == "abcd"
    arena.free(handle)
    assert arena.stats()["blocks"] == 1
    other.kill()
    assert arena.sweep() == 1
    assert arena.stats()["blocks"] == 0
    assert arena.fsck() == []


def test_a_killed_writers_sealed_block_is_adopted(arena, helper):
    other = helper(writer, arena.address, 100_000)
    handle = Handle.parse(other.line())
    other.kill()
    with Arena.attach(arena.address):  # whoever attaches recovers
        stats = arena.stats()
        assert (stats["blocks"], stats["orphaned"]) == (1, 1)
    arena.adopt(handle)
    with arena.get(handle, verify=True) as view:
        assert bytes(view) == b"w" * 100_000
    assert arena.free(handle) == 1
    assert arena.fsck() == []


def test_orphans_expire_when_asked_to(helper):
    with Arena.create("1MiB", orphan_ttl_s=0.05) as arena:
        other = helper(writer, arena.address, 1000)
        handle = Handle.parse(other.line())
        other.kill()
        deadline = time.monotonic() + 10
        while arena.stats()["blocks"] and time.monotonic() < deadline:
            arena.sweep()
        with pytest.raises(StaleHandle, match=rf"was freed as an orphan by .* \({os.getpid()}\), \d\.\d s ago"):
            arena.adopt(handle)
        arena.unlink()


def test_a_reader_that_dies_after_its_last_done_bit(arena, helper):
    """The shipped block stays its owner's; a reader's death alone frees nothing and blocks nothing."""
    handle = arena.put(b"abcd")
    arena.ship(handle, readers=2, step=1)
    other = helper(reader, arena.address, handle)
    other.line()
    other.kill()
    arena.sweep()
    assert arena.stats()["blocks"] == 1
    arena.done(handle, reader=0)
    arena.done(handle, reader=1)
    assert arena.stats()["blocks"] == 0


def test_a_stopped_process_is_alive(arena, helper):
    handle = arena.put(b"abcd")
    other = helper(reader, arena.address, handle)
    other.line()
    other.signal(signal.SIGSTOP)
    assert arena.sweep() == 0
    arena.free(handle)
    assert arena.stats()["blocks"] == 1
    arena.free(arena.put(bytes(10 * MIB)))  # and is in nobody's way
    other.signal(signal.SIGCONT)
    other.say()
    assert other.wait() == 0
    assert arena.stats()["blocks"] == 0


def stopped_inside(arena, hog, handles):
    """Stops the hog at any moment until one of them is inside the lock -> the error that says so."""
    for _ in range(100):
        time.sleep(0.01)
        hog.signal(signal.SIGSTOP)
        try:
            handles.append(arena.put(b"", timeout_s=0.3))
        except PeerStalled as error:
            return error
        hog.signal(signal.SIGCONT)
    raise AssertionError("never stopped inside")


def test_a_stopped_holder_of_the_lock_is_named_at_the_deadline(arena, helper):
    handles = [arena.put(b"") for _ in range(50_000)]
    hog = helper(lock_hog, arena.address)
    hog.line()
    stalled = stopped_inside(arena, hog, handles)
    assert (stalled.pid, stalled.stopped) == (hog.process.pid, True)
    assert f"and is stopped (kill -CONT {hog.process.pid})" in str(stalled)
    assert 0.2 < stalled.held_s < 5
    with pytest.raises(PeerStalled):  # however long it is stopped
        arena.put(b"", timeout_s=0.5)
    hog.signal(signal.SIGCONT)
    handles.append(arena.put(b"", timeout_s=30))  # passed on by its owner
    stopped_inside(arena, hog, handles)
    hog.kill()
    handles.append(arena.put(b"", timeout_s=30))  # taken over from the dead
    assert arena.free(handles) == len(handles)
    assert arena.fsck() == []


def test_a_process_in_another_pid_namespace_is_alive(arena):
    handle = arena.put(b"abcd")
    code = f"from tests.arena.test_processes import reader; reader({arena.address!r}, {str(handle)!r})"
    command = [*UNSHARE, "-p", "-f", "--kill-child", sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "abcd\n"
        assert arena.sweep() == 0
        assert len(arena.holders(handle)["held_by"]) == 1
        other.kill()
    wait_until(lambda: arena.sweep() + 1 and not arena.holders(handle)["held_by"])
    arena.free(handle)


def test_a_fork_is_detached_and_does_not_keep_its_parent_alive(arena, helper):
    handle = arena.put(b"abcd")
    other = helper(forker, arena.address, handle)
    child, *verdicts = other.line().split()
    assert verdicts == ["closed", "closed", "closed", "attached"]
    assert len(arena.holders(handle)["held_by"]) == 1  # the child let go of nothing
    try:
        other.kill()
        assert arena.sweep() == 1
        assert arena.holders(handle)["held_by"] == ()
    finally:
        os.kill(int(child), signal.SIGKILL)
    arena.free(handle)


# --------------------------------------------------------------------------------------------------- waiting for space


def test_full_names_the_holder(arena):
    handle = arena.put(bytes(40 * MIB), tag="run/big")
    with pytest.raises(ArenaFull, match=r"no room for 40\.0 MiB after 0\.\d s.*40\.\d MiB in 1 blocks") as caught:
        arena.put(bytes(40 * MIB), timeout_s=0.05)
    assert caught.value.errno == 28
    assert str(os.getpid()) in str(caught.value)
    assert arena.stats()["waits"] == 1
    arena.free(handle)


def test_a_put_waits_until_another_process_frees(arena, helper):
    other = helper(waiter, arena.address, 40 * MIB, "first")
    assert [other.line(), other.line()] == ["waiting", "first"]
    threading.Timer(0.2, other.say).start()  # while we wait
    handle = arena.put(bytes(40 * MIB), timeout_s=30)
    assert other.line() == "freed"
    arena.free(handle)


def test_waiting_is_first_come_first_served(arena, helper):
    handles = [arena.put(bytes(20 * MIB)) for _ in range(3)]
    large = helper(waiter, arena.address, 40 * MIB, "large")
    assert large.line() == "waiting"
    wait_until(lambda: arena.stats()["waits"] == 1)
    small = helper(waiter, arena.address, 10 * MIB, "small")
    assert small.line() == "waiting"
    wait_until(lambda: arena.stats()["waits"] == 2)
    arena.free(handles[0])  # enough for the small one, which came second
    with pytest.raises(ArenaFull):
        arena.put(bytes(10 * MIB), on_full="raise")
    arena.free(handles[1])
    assert large.line() == "large"
    large.say()
    assert small.line() == "small"
    small.say()
    assert [large.wait(), small.wait()] == [0, 0]
    arena.free(handles[2])


def test_pressure_tells_that_somebody_waits(arena, helper):
    handle = arena.put(bytes(40 * MIB))
    calm = arena.pressure()
    assert calm["used_bytes"] == arena.stats()["used_bytes"]
    assert calm["capacity_bytes"] == 64 * MIB
    assert (calm["waiting"], calm["oldest_wait_s"]) == (0, 0.0)
    other = helper(waiter, arena.address, 40 * MIB, "b")
    assert other.line() == "waiting"
    wait_until(lambda: arena.pressure()["waiting"])
    arena.free(handle)
    assert other.line() == "b"
    assert arena.pressure()["waiting"] == 0
    other.kill()


def test_a_wait_that_is_given_up_ends_at_once(arena):
    handle = arena.put(bytes(40 * MIB))
    wanted = threading.Event()
    wanted.set()

    def put():
        with giving_up(wanted):
            arena.put(bytes(40 * MIB), timeout_s=None)

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(put)
        wait_until(lambda: arena.stats()["waits"] == 1)
        wanted.clear()
        with pytest.raises(ArenaFull, match=r"no room for 40\.0 MiB"):
            waiting.result(10)
    arena.free(handle)
    arena.free(arena.put(bytes(40 * MIB)))


def test_a_killed_waiter_loses_its_place(arena, helper):
    handles = [arena.put(bytes(20 * MIB)) for _ in range(3)]
    first = helper(waiter, arena.address, 60 * MIB, "first")
    first.line()
    wait_until(lambda: arena.stats()["waits"] == 1)
    first.kill()
    arena.free(handles[0])
    handles[0] = arena.put(bytes(10 * MIB), timeout_s=10)
    assert arena.free(handles) == 3


def test_more_than_fits_passes_through(arena, helper):
    """160 MiB offered to 64 MiB by two writers; everything arrives, nothing is refused, the bound holds."""
    writers = [helper(many_puts, arena.address, 80, MIB) for _ in range(2)]

    def consume(one):  # whichever comes: whoever insists on one writer's next block may find the other's everywhere
        for i in range(80):
            handle = Handle.parse(one.line())
            arena.adopt(handle)
            with arena.get(handle, verify=True) as view:
                assert memoryview(view)[0] == i
            arena.free(handle)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(consume, writers)) == [None, None]
    for one in writers:
        one.say()
        assert one.wait() == 0
    stats = arena.stats()
    assert (stats["blocks"], stats["created"], stats["freed"]) == (0, 160, 160)
    assert stats["peak_bytes"] <= 64 * MIB


def test_threads_of_one_process_share_it(arena):
    failures = []

    def work(seed):
        try:
            for i in range(300):
                handle = arena.put(bytes([seed]) * (i * 997 % 200_000), tag="run/t")
                with arena.get(handle, verify=True) as view:
                    assert bytes(memoryview(view)[:1]) in (b"", bytes([seed]))
                arena.free(handle)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert arena.fsck() == []
    assert arena.stats()["blocks"] == 0


def test_a_role_is_named_by_its_title_and_anything_else_by_its_script(arena):
    code = (
        "import sys, setproctitle; from shmrl.arena import Arena; "
        "sys.argv[2:] and setproctitle.setproctitle(sys.argv[2]); "
        "arena = Arena.attach(sys.argv[1]); print(flush=True); sys.stdin.readline(); arena.close()"
    )
    commands = [[sys.executable, "-c", code, arena.address, *title] for title in (["shmrl:env-server:a"], [])]
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for command in commands
    ]
    try:
        for process in processes:
            process.stdout.readline()
        attached = {one["pid"]: one["name"] for one in stats(arena.address)[0]["attached"]}
        assert [attached[process.pid] for process in processes] == ["env-server:a", f"-c {arena.address}"]
    finally:
        for process in processes:
            process.communicate("\n")


def waits(address, connection):
    with Arena.attach(address):
        connection.send(os.getpid())
        connection.recv()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_children_of_multiprocessing_are_told_apart(arena, method, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "x" * 90])
    context = multiprocessing.get_context(method)
    pipes = [context.Pipe() for _ in range(2)]
    children = [
        context.Process(target=waits, args=(arena.address, theirs), name=f"{'x' * 50}\udcff-{rank}")
        for rank, (_, theirs) in enumerate(pipes)
    ]
    for child in children:
        child.start()
    try:
        pids = [ours.recv() for ours, _ in pipes]
        attached = {one["pid"]: one["name"] for one in stats(arena.address)[0]["attached"]}
        assert [attached[pid][-3:] for pid in pids] == ["?-0", "?-1"]
    finally:
        for child, (ours, _) in zip(children, pipes, strict=True):
            ours.send(None)
            child.join()
    assert [child.exitcode for child in children] == [0, 0]


def test_a_refusal_says_what_rounding_adds(arena):
    for _ in range(1023):
        arena.put(bytes(40_000), tag="run/a", checksum=False)  # a page of 64 KiB each
    with pytest.raises(ArenaFull, match=r"no room for 68\.4 KiB \(128\.0 KiB of the arena\) after"):
        arena.put(bytes(70_000), on_full="raise")
