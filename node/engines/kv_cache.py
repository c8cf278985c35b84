"""Keys and values of the positions that a policy has seen, in one piece of memory.

All rows share the column that is written next, so that a step writes one slice whatever the lengths of the rows: a
row's text ends at that column and begins where it may. Leaves out which row is whose.
"""

from __future__ import annotations

from torch import Tensor


class KVCache:
    """[layers, rows, kv_heads, columns, head_dim] each of keys and values; `length` columns are written."""

    def __init__(self, keys: Tensor, values: Tensor, length: int = 0) -> None:
        self._keys = keys
        self._values = values
        self.length = length
        flat = -1, *keys.shape[3:]
        self._by_layer = [(key.view(flat), value.view(flat)) for key, value in zip(keys, values, strict=True)]
        """[rows · kv_heads, columns, head_dim], in the same memory."""

    @classmethod
    def empty(cls, shape: tuple[int, int, int], *, rows: int, capacity: int, like: Tensor) -> KVCache:
        """`shape` is (layers, kv_heads, head_dim). Memory is reserved, and used where it is written."""
        layers, kv_heads, head_dim = shape
        full = (layers, rows, kv_heads, capacity, head_dim)
        return cls(like.new_empty(full), like.new_empty(full))

    @property
    def capacity(self) -> int:
        return self._keys.shape[3]

    def extend(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add one layer's keys and values [rows, kv_heads, T, D] behind what is written; gives all of them.

        `advance` moves on after the last layer.
        """
        stop = self.length + keys.shape[2]
        self._keys[layer, :, :, self.length : stop] = keys
        self._values[layer, :, :, self.length : stop] = values
        return self._keys[layer, :, :, :stop], self._values[layer, :, :, :stop]

    def append(self, layer: int, key: Tensor, value: Tensor, *, start: int) -> tuple[Tensor, Tensor]:
        """Add a column [rows, kv_heads, D] to the first rows; theirs from `start` on, [rows · kv_heads, columns, D]."""
        keys, values = self._by_layer[layer]
        rows, column = key.shape[0] * key.shape[1], self.length
        keys[:rows, column] = key.reshape(rows, -1)
        values[:rows, column] = value.reshape(rows, -1)
        return keys[:rows, start : column + 1], values[:rows, start : column + 1]

    def advance(self, columns: int) -> None:
        self.length += columns

    def part(self, start: int, stop: int) -> KVCache:
        """Some rows, in the same memory; what is appended there shows here once this cache advances too."""
        return KVCache(self._keys[:, start:stop], self._values[:, start:stop], self.length)

    def select(self, rows: Tensor, *, capacity: int = 0) -> KVCache:
        """A copy of some rows, in the order given; a row may be repeated. Capacity 0 keeps this one's."""
        layers, _, kv_heads, columns, head_dim = self._keys.shape
        chosen = KVCache.empty(
            (layers, kv_heads, head_dim), rows=len(rows), capacity=capacity or columns, like=self._keys
        )
        chosen.length = self.length
        for ours, theirs in ((self._keys, chosen._keys), (self._values, chosen._values)):
            theirs[:, :, :, : self.length] = ours[:, rows, :, : self.length]
        return chosen

    def put(self, first: int, source: KVCache, rows: Tensor) -> None:
        """Copy rows of another cache to the rows from `first` on, so that they end where this one's columns end."""
        part = slice(first, first + len(rows)), slice(None), slice(self.length - source.length, self.length)
        for ours, theirs in ((self._keys, source._keys), (self._values, source._values)):
            for layer in range(len(ours)):
                ours[layer][part] = theirs[layer, rows, :, : source.length]

    def move_rows(self, rows: Tensor, onto: Tensor, *, start: int) -> None:
        """Copy the columns of some rows from `start` on over those of others."""
        for each in (self._keys, self._values):
            each[:, onto, :, start : self.length] = each[:, rows, :, start : self.length]

    def move_columns(self, start: int, to: int) -> None:
        """Move all columns from `start` on so that they begin at another one, a layer at a time to save memory."""
        width = self.length - start
        for each in (self._keys, self._values):
            for layer in each:
                layer[:, :, to : to + width] = layer[:, :, start : self.length].clone()
        self.length = to + width

    def clear(self, rows: slice, columns: slice) -> None:
        """Zeros where nothing was written: not every bit pattern that memory may hold is a number."""
        self._keys[:, rows, :, columns] = 0
        self._values[:, rows, :, columns] = 0
