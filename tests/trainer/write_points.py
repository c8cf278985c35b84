"""Every point at which a process writes: a child that is killed, or meets a full disk, at the n-th of them.

Points are what the interpreter announces (opening for writing, making, renaming, removing), every fsync and every
write of bytes, which is done by half first. The child is a fork, so that it need not import anything again.
"""

import errno
import gc
import os
import signal
import sys

EVENTS = (
    "os.mkdir",
    "os.rename",
    "os.remove",
    "os.rmdir",
    "os.truncate",
    "os.chmod",
    "shutil.copyfile",
    "shutil.rmtree",
)


class Points:
    """Counts points down; at the last one it strikes."""

    def __init__(self, number, *, kill):
        self.left = number
        self.kill = kill

    def pass_by(self):
        self.left -= 1
        if self.left:
            return
        if self.kill:
            os.kill(os.getpid(), signal.SIGKILL)
        raise OSError(errno.ENOSPC, "No space left on device")

    def install(self, *safetensors_users):
        sys.addaudithook(self._on_event)
        fsync, write = os.fsync, os.write

        def counted_fsync(descriptor):
            self.pass_by()
            fsync(descriptor)

        def counted_write(descriptor, data):
            done = write(descriptor, bytes(data)[: len(data) // 2])
            self.pass_by()
            return done + write(descriptor, bytes(data)[done:])

        os.fsync, os.write = counted_fsync, counted_write
        for module in safetensors_users:
            module.save_file = self._torn(module.save_file)

    def _on_event(self, event, arguments):
        opened = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if event in EVENTS or opened:
            self.pass_by()

    def _torn(self, save_file):
        """The library writes from native code: half of its file stands for where it is interrupted."""

        def save(tensors, path, **settings):
            save_file(tensors, path, **settings)
            whole = path.read_bytes()
            with path.open("r+b") as file:
                file.truncate(len(whole) // 2)
            self.pass_by()
            path.write_bytes(whole)

        return save


def run_child(work):
    """Run `work` in a forked process: 0 when it returned, its exit code, or minus its signal."""
    child = os.fork()
    if child == 0:
        gc.disable()  # it would touch, and so copy, every page that holds an object
        code = 1
        try:
            work()
            code = 0
        except SystemExit as end:
            code = end.code
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)
