"""The command line, one module for each family of commands; cli puts them together.

A module here reads flags, calls one function and prints. What it calls is imported when it is called, so that
`--help`, `id`, `status` and `config` load no torch, libp2p, trio or aiohttp.
"""
