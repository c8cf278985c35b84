"""The one part of the build that pyproject.toml has no settled words for: the compiled arithmetic of proofs.

It is optional. Where there is no C compiler the installation succeeds without it, and numpy does the work.
"""

from setuptools import Extension, setup

kernel = Extension(
    "protocol._toploc",
    ["protocol/_toploc.c"],
    depends=["setup.py"],
    extra_compile_args=["-O3"],  # some Pythons build extensions with less, which leaves the loops unvectorised
    optional=True,
    py_limited_api=True,
)

setup(ext_modules=[kernel], options={"bdist_wheel": {"py_limited_api": "cp311"}})
