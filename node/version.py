"""What this program calls itself in records, adverts and status."""

from importlib.metadata import PackageNotFoundError, version

from protocol.constants import PROTOCOL_VERSION

try:
    VERSION = version("intellect-node")
except PackageNotFoundError:  # run from a clone that was never installed
    VERSION = "0.0.0"

SOFTWARE = f"intellect-node/{VERSION}"
PROTOCOL = PROTOCOL_VERSION
