"""Programs that try to get out of the sandbox, or to harm the machine from inside, and a process that runs them.

Each prints BLOCKED where it was stopped and ESCAPED where it was not; those that print nothing must end as said beside
them. Run as a script, `hostile.py KIND UID` becomes the user UID, runs all of them in boxes of that kind, and prints
one JSON line a program and one on what was left behind. Its victims are real: a secret, servers, a process, this one.
"""

import contextlib
import ctypes
import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path

from environments.sandbox.interpreter import interpreters
from environments.sandbox.launch import BoxSpec, Isolation, Kind, find_bwrap
from environments.sandbox.limits import Limits
from environments.sandbox.pool import SandboxPool

SECRET = "SECRETKEY"
LIMITS = Limits(
    cpu_s=0.4, cpu_end_s=1, memory_bytes=64 << 20, address_space_bytes=256 << 20, wall_s=12, output_bytes=1 << 18
)
SYSCALL = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
def call(x86, arm, *arguments):
    import os
    result = libc.syscall(x86 if os.uname().machine == "x86_64" else arm, *arguments)
    refused = result == -1 and ctypes.get_errno() in (1, 13, 38)  # EPERM, EACCES, ENOSYS: never got to be judged
    return -1 if refused else f"call {x86} gave {result} with error {ctypes.get_errno()}"
"""
TRY = """
import os
def attempt(*actions):
    for action in actions:
        try:
            got = action()
        except (OSError, ValueError, MemoryError, RuntimeError) as error:
            continue
        if isinstance(got, int) and got == -1:
            continue
        print("ESCAPED", got)
        return
    print("BLOCKED")
"""
ENDS = {
    "infinite loop in threads": "used up its CPU time",
    "infinite loop that ignores signals": "used up its CPU time",
    "sleep that ignores signals": "did not end in time",
    "close everything and sleep": "did not end in time",
    "endless output": "printed too much",
    "endless output to the result": "printed too much",
    "crash": "crashed",
    "compile bomb": "ended badly",
    "exit in the middle": "ended badly",
}
"""How programs that print nothing must end."""
MAY_END = {"deep recursion": {"crashed", "used up its CPU time"}}
"""How others may end that did not get to print anything."""
HEAVY = {
    "infinite loop in threads",
    "infinite loop that ignores signals",
    "deep recursion",
    "memory bomb",
    "many threads",
}
"""On a busy machine these may pass their wall limit before any other."""
GONE_WITHIN_S = 3.0
"""A tenth of a second is enough where the machine has one to spare."""


def programs(port, udp_port, sleeper, parent, secret, directory):
    """Every program by its name."""
    return {
        "fork bomb": TRY + "attempt(os.fork, os.fork, os.forkpty)",
        "fork by system call": SYSCALL + TRY + "attempt(lambda: call(57, 220, 17), lambda: call(58, 220, 0x4011))",
        "clone3": SYSCALL + TRY + "attempt(lambda: call(435, 435, ctypes.create_string_buffer(88), 88))",
        "memory bomb": """
kept = []
try:
    for _ in range(300):
        kept.append(bytearray(b"x") * (4 << 20))
    print("ESCAPED")
except MemoryError:
    kept = None
    print("BLOCKED")
""",
        "memory in shared mappings": "import mmap\n" + TRY + "attempt(lambda: mmap.mmap(-1, 1 << 30))",
        "memory in files without a name": SYSCALL
        + TRY
        + "attempt(lambda: os.memfd_create('a'), lambda: call(447, 447, 0))",
        "System V and POSIX shared memory": SYSCALL
        + TRY
        + "attempt(lambda: call(29, 194, 0, 1 << 20, 0o1600), lambda: call(68, 186, 0, 0o1600), "
        "lambda: os.open('/dev/shm/x', os.O_RDWR | os.O_CREAT))",
        "disk fill": TRY + f"places = {directory!r}, '/tmp', '/var/tmp', '/dev/shm', '.'\n"
        "attempt(*(lambda p=p: open(p + '/fill', 'wb') for p in places))",
        "infinite loop in threads": "import threading\n"
        "def spin():\n    while True: pass\n"
        "for _ in range(3): threading.Thread(target=spin).start()",
        "infinite loop that ignores signals": "import signal\n"
        "for n in range(1, 32):\n    try: signal.signal(n, signal.SIG_IGN)\n    except (OSError, ValueError): pass\n"
        "while True: pass",
        "sleep that ignores signals": "import signal, time\nsignal.signal(15, signal.SIG_IGN)\n"
        "while True: time.sleep(1)",
        "close everything and sleep": "import os, time\nos.closerange(0, 64)\ntime.sleep(60)",
        "read the password file": TRY + "attempt(lambda: open('/etc/passwd').read())",
        "read a key": TRY
        + f"attempt(lambda: open({secret!r}).read(), lambda: os.open({secret!r}, os.O_PATH | os.O_RDWR))",
        "read a key through a link": TRY
        + f"attempt(lambda: os.symlink({secret!r}, {directory!r} + '/l'), lambda: os.link({secret!r}, '/tmp/l'))",
        "read with openat2": SYSCALL
        + TRY
        + f"attempt(lambda: call(437, 437, -100, {secret!r}.encode(), ctypes.create_string_buffer(24), 24))",
        "TCP": f"import socket\n{TRY}attempt(lambda: socket.create_connection(('127.0.0.1', {port}), 1).recv(9))",
        "UDP": f"import socket\n{TRY}attempt(lambda: socket.socket(2, 2).sendto(b'x', ('127.0.0.1', {udp_port})))",
        "abstract Unix socket": f"import socket\n{TRY}\n"
        f"def go():\n    s = socket.socket(1); s.connect('\\0hostile{port}'); return s.recv(9)\nattempt(go)",
        "other sockets": f"import socket\n{TRY}attempt(lambda: socket.socket(16, 3, 0), lambda: socket.socket(17, 3), "
        "lambda: socket.socket(40, 1), socket.socketpair)",
        "write outside": TRY
        + f"attempt(*(lambda p=p: open(p, 'w') for p in ({directory!r} + '/x', '/x', '/usr/lib/x', '/dev/null')))",
        "change what is outside": TRY + f"attempt(lambda: os.chmod({secret!r}, 0o777), lambda: os.utime({secret!r}), "
        f"lambda: os.truncate({secret!r}, 0), lambda: os.rename({secret!r}, '/tmp/n'), lambda: os.unlink({secret!r}), "
        f"lambda: os.setxattr({secret!r}, 'user.x', b''), lambda: os.mkfifo({directory!r} + '/f'))",
        "signal others": TRY + "attempt(*(lambda p=p: os.kill(p, 0) for p in "
        f"({parent}, {sleeper}, os.getppid(), 1, -1)), *(lambda p=p: os.killpg(p, 0) for p in ({parent}, {sleeper})))",
        "signal others by a descriptor's owner": "import fcntl\n"
        + TRY
        + f"r, w = os.pipe()\nattempt(lambda: fcntl.fcntl(r, fcntl.F_SETOWN, {sleeper}), "
        "lambda: fcntl.fcntl(r, 10, 9), lambda: fcntl.ioctl(r, 0x8901, b'1234'), "
        "lambda: fcntl.ioctl(r, 0x5452, b'1234'))",
        "signal others by system call": SYSCALL
        + TRY
        + f"attempt(lambda: call(200, 130, {sleeper}, 15), lambda: call(129, 138, {sleeper}, 15, bytes(128)), "
        f"lambda: call(434, 434, {sleeper}, 0), lambda: call(424, 424, 3, 15, 0, 0))",
        "trace others": SYSCALL
        + TRY
        + f"attempt(lambda: call(101, 117, 16, {sleeper}, 0, 0), lambda: call(101, 117, 0, 0, 0, 0), "
        f"lambda: call(310, 270, {parent}, bytes(16), 1, bytes(16), 1, 0), lambda: call(438, 438, 3, 0, 0))",
        "look at others": TRY + f"attempt(lambda: os.listdir('/proc'), lambda: open('/proc/{parent}/cmdline').read(), "
        f"lambda: open('/proc/{parent}/mem', 'rb'), lambda: os.getpriority(0, {parent}), "
        f"lambda: os.sched_getaffinity({parent}), lambda: os.getsid({parent}), lambda: os.getpgid({parent}))",
        "change others": "import resource\n"
        + TRY
        + f"attempt(lambda: resource.prlimit({sleeper}, 7, (1, 1)), lambda: os.setpriority(0, {sleeper}, 19), "
        f"lambda: os.sched_setaffinity({sleeper}, [0]))",
        "outlive the run": TRY + "attempt(os.fork, os.setsid, lambda: os.setpgid(0, 0))",
        "a namespace of its own": SYSCALL
        + TRY
        + "attempt(lambda: call(272, 97, 0x10020000), lambda: call(56, 220, 0x10000011, 0, 0, 0, 0), "
        "lambda: call(308, 268, 0, 0), lambda: call(165, 40, b'x', b'/', b'tmpfs', 0, 0), lambda: os.chroot('/'))",
        "run another program": TRY + "attempt(lambda: os.execv('/bin/sh', ['sh', '-c', 'echo ESCAPED']), "
        "lambda: os.execv('/usr/bin/env', ['env']), lambda: os.posix_spawn('/bin/sh', ['sh'], {}))",
        "many descriptors": TRY + "attempt(lambda: [os.dup(1) for _ in range(5000)][-1])",
        "many threads": """
import _thread, time
_thread.stack_size(1 << 15)
lock = _thread.allocate_lock(); lock.acquire()
try:
    for _ in range(2000): _thread.start_new_thread(lock.acquire, ())
    print("ESCAPED")
except RuntimeError:
    print("BLOCKED")
""",
        "raise limits": "import resource\n"
        + TRY
        + "attempt(*(lambda r=r: resource.setrlimit(r, (resource.RLIM_INFINITY,) * 2) for r in range(16)))",
        "become root": TRY + "attempt(lambda: os.setuid(0), lambda: os.setresuid(0, 0, 0), lambda: os.setgroups([0]))",
        "kernel interfaces": SYSCALL
        + TRY
        + "attempt(lambda: call(425, 425, 8, bytes(120)), lambda: call(323, 282, 0), "
        "lambda: call(321, 280, 0, bytes(64), 64), lambda: call(298, 241, bytes(112), 0, -1, -1, 0), "
        "lambda: call(250, 219, 0, -3, 1), lambda: call(175, 105, 0, 0, b''), "
        "lambda: call(294, 26, 0), lambda: call(300, 262, 0, 0), lambda: call(240, 180, b'/q', 0o102, 0o600, 0), "
        "lambda: call(135, 92, 0xFFFFFFFF), lambda: call(169, 142, 1, 2, 3, 0))",
        "calls of the 32-bit x86": r"""
import ctypes, mmap, os
if os.uname().machine != "x86_64":
    print("BLOCKED"); raise SystemExit
code = b"\x53\xb8\x14\x00\x00\x00\xcd\x80\x5b\xc3"  # push rbx; mov eax, 20 (getpid); int 0x80; pop rbx; ret
memory = mmap.mmap(-1, 4096, prot=7)
memory.write(code)
function = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(memory)))
print("BLOCKED so far", flush=True)
print("ESCAPED", function())
""",
        "calls of x32": SYSCALL
        + TRY
        + "attempt(lambda: call(0x40000000 + 39, 0x40000000), lambda: call(0x40000000 + 57, -1))",
        "lift the filter": SYSCALL
        + TRY
        + "attempt(lambda: libc.prctl(22, 1, 0, 0, 0), lambda: call(317, 277, 0, 0, 0), "
        "lambda: libc.prctl(4, 1, 0, 0, 0), lambda: libc.prctl(1, 0, 0, 0, 0))",
        "the driver's descriptors": TRY + "attempt(*(lambda n=n: os.write(n, b'x') for n in range(4, 1024)))",
        "the node's environment": "import os\nprint('ESCAPED' if 'HOSTILE_CANARY' in os.environ else 'BLOCKED')",
        "endless output": "import sys\nwhile True: sys.stdout.write('y' * 65536)",
        "endless output to the result": "import os\nwhile True: os.write(3, b'y' * 65536)",
        "crash": "import ctypes\nctypes.string_at(0)",
        "exit in the middle": "import os\nos._exit(98)",
        "deep recursion": "import sys\nsys.setrecursionlimit(10**9)\n"
        "def f(n): return f(n + 1)\ntry: f(0)\nexcept (RecursionError, MemoryError): print('BLOCKED')",
        "compile bomb": "x = " + "(" * 20_000 + ")" * 20_000,
        "set off timers": TRY
        + SYSCALL
        + "attempt(lambda: call(222, 107, 0, 0, bytes(8)), lambda: call(283, 85, 1, 0))",
    }


def serve(port_holder):
    """Servers on the loopback that a program must not reach."""
    tcp, udp, unix = socket.socket(), socket.socket(2, 2), socket.socket(1)
    tcp.bind(("127.0.0.1", 0))
    udp.bind(("127.0.0.1", 0))
    port_holder += [tcp.getsockname()[1], udp.getsockname()[1]]
    unix.bind(f"\0hostile{port_holder[0]}")
    for server in (tcp, unix):
        server.listen()
        threading.Thread(target=_accept, args=(server,), daemon=True).start()
    return tcp, udp, unix


def _accept(server):
    while True:
        connection, _ = server.accept()
        connection.sendall(b"hello")
        connection.close()


def isolation_of(kind):
    """A kind of isolation, whether or not a stronger one works here too."""
    found = interpreters(None)
    interpreter = next(found)
    if kind is Kind.LANDLOCK and os.getuid() == 0 and not interpreter.reachable_by_all:
        interpreter = next(each for each in found if each.reachable_by_all)
    return Isolation(kind, interpreter, find_bwrap() or "")


def pool_of(kind, limits=LIMITS, **settings):
    """A pool of boxes of a kind."""
    return SandboxPool(BoxSpec(limits=limits, **settings), size=2, isolation=isolation_of(kind))


def become_subreaper():
    """Orphans below this process become its children, so that none can hide."""
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)


def children_left(within_s):
    """Whether any process below this one is left after so many seconds; those that ended are reaped."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return False
        time.sleep(0.01)
    return True


def run_all(kind):
    """Run every program, and say what each did."""
    with tempfile.TemporaryDirectory(prefix="hostile-") as name:
        directory = Path(name)
        directory.chmod(0o777)
        secret = directory / "key"
        secret.write_text(SECRET)
        ports = []
        servers = serve(ports)
        sleeper = subprocess.Popen(["sleep", "1000"])
        table = programs(*ports, sleeper.pid, os.getpid(), str(secret), str(directory))
        pool = pool_of(kind)
        run_one(pool, "warm", "print('BLOCKED')")
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for result in pool.map(lambda item: run_one(pool, *item), list(table.items())):
            print(json.dumps(result), flush=True)
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        began = time.monotonic()
        for box in list(pool._alive):
            box.kill()
        killed_s = time.monotonic() - began
        pool.close()
        harmed = sleeper.poll() is not None
        sleeper.kill()
        sleeper.wait()
        left = sorted(each.name for each in directory.iterdir())
        kept = secret.read_text() == SECRET and secret.stat().st_mode & 0o777 != 0o777
        for server in servers:
            server.close()
        summary = {
            "killed_s": killed_s,
            "processes": children_left(GONE_WITHIN_S),
            "grown_kb": grown,
            "files": left,
            "secret": kept,
            "harmed": harmed,
        }
        print(json.dumps({"summary": summary | {"uid": os.getuid()}}), flush=True)


def run_one(pool, name, source):
    """One program: how it ended, and what it printed."""
    with pool.box() as box:
        outcome = box.run_program(source)
    printed = outcome.output[:200].decode(errors="replace")
    ended = {"ended": outcome.ended.value, "detail": outcome.detail}
    return {"name": name, **ended, "printed": printed, "took": outcome.wall_s}


def become(uid):
    """An ordinary user, in this very process: its interpreter may lie where only root may look."""
    if os.getuid() == 0 and uid:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        os.environ.pop("HOME", None)
        os.chdir("/")


def loop_for_ever(kind):
    """Say so when a program runs that never ends; for whoever kills this process then."""
    pool = pool_of(kind, replace(LIMITS, cpu_end_s=600, wall_s=600))
    with pool.box() as box:
        threading.Timer(0.5, lambda: print("running", flush=True)).start()
        box.run_program("while True: pass")


def kill_the_node(kind, uid):
    """Kill a process whose box is busy; whether anything below it is left GONE_WITHIN_S later."""
    become_subreaper()
    with subprocess.Popen([sys.executable, __file__, kind, uid, "loop"], stdout=subprocess.PIPE) as node:
        node.stdout.readline()
        node.kill()
        node.wait()
        print(json.dumps({"processes": children_left(GONE_WITHIN_S)}))


def main():
    kind, uid, *what = sys.argv[1:]
    os.environ["HOSTILE_CANARY"] = "x"
    if what == ["kill"]:
        kill_the_node(kind, uid)
        return
    become(int(uid))
    if what == ["loop"]:
        loop_for_ever(Kind(kind))
        return
    become_subreaper()
    with contextlib.suppress(BrokenPipeError):
        run_all(Kind(kind))


if __name__ == "__main__":
    main()
