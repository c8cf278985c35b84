"""Reference solutions of the sample problems of code, by their ids."""

SOLUTIONS = {
    "sum-of-numbers": """\
print(sum(map(int, input().split())))
""",
    "count-vowels": """\
print(sum(letter in 'aeiou' for letter in input().lower()))
""",
    "fizzbuzz": """\
for i in range(1, int(input()) + 1):
    print('Fizz' * (i % 3 == 0) + 'Buzz' * (i % 5 == 0) or i)
""",
    "reverse-lines": """\
import sys
lines = sys.stdin.read().split('\\n')
n = int(lines[0])
for line in reversed(lines[1 : n + 1]):
    print(line[::-1])
""",
    "balanced-brackets": """\
stack, ok = [], True
for c in input():
    if c in '([{':
        stack.append(c)
    elif not stack or stack.pop() + c not in ('()', '[]', '{}'):
        ok = False
        break
print('YES' if ok and not stack else 'NO')
""",
    "prime-factors": """\
n = int(input())
factors, p = [], 2
while p * p <= n:
    while n % p == 0:
        factors.append(p)
        n //= p
    p += 1
if n > 1:
    factors.append(n)
print(*factors)
""",
    "shortest-path": """\
import heapq
n, m = map(int, input().split())
graph = {node: [] for node in range(1, n + 1)}
for _ in range(m):
    a, b, w = map(int, input().split())
    graph[a].append((b, w))
    graph[b].append((a, w))
best, queue = {}, [(0, 1)]
while queue:
    length, node = heapq.heappop(queue)
    if node in best:
        continue
    best[node] = length
    for other, w in graph[node]:
        heapq.heappush(queue, (length + w, other))
print(best.get(n, -1))
""",
    "count-islands": """\
rows, columns = map(int, input().split())
land = {(r, c) for r in range(rows) for c, cell in enumerate(input()) if cell == '#'}
count = 0
while land:
    count += 1
    waiting = [land.pop()]
    while waiting:
        r, c = waiting.pop()
        for near in ((r + 1, c), (r - 1, c), (r, c + 1), (r, c - 1)):
            if near in land:
                land.remove(near)
                waiting.append(near)
print(count)
""",
    "mean-and-deviation": """\
n = int(input())
values = list(map(float, input().split()))
mean = sum(values) / n
print(mean, (sum((v - mean) ** 2 for v in values) / n) ** 0.5)
""",
    "longest-increasing": """\
import bisect
input()
tails = []
for value in map(int, input().split()):
    place = bisect.bisect_left(tails, value)
    tails[place:place + 1] = [value]
print(len(tails))
""",
    "word-count": """\
import sys
from collections import Counter
for word, count in sorted(Counter(sys.stdin.read().lower().split()).items(), key=lambda pair: (-pair[1], pair[0])):
    print(word, count)
""",
    "is-palindrome": """\
def is_palindrome(text):
    kept = [c for c in text.lower() if c.isalnum()]
    return kept == kept[::-1]
""",
    "two-sum": """\
class Solution:
    def twoSum(self, nums, target):
        seen = {}
        for place, value in enumerate(nums):
            if target - value in seen:
                return [seen[target - value], place]
            seen[value] = place
""",
    "roman-numerals": """\
def to_roman(n):
    out = ''
    signs = '1000 M 900 CM 500 D 400 CD 100 C 90 XC 50 L 40 XL 10 X 9 IX 5 V 4 IV 1 I'.split()
    for value, sign in zip(map(int, signs[::2]), signs[1::2]):
        count, n = divmod(n, value)
        out += sign * count
    return out
""",
    "merge-intervals": """\
def merge(intervals):
    out = []
    for start, end in sorted(intervals):
        if out and start <= out[-1][1]:
            out[-1][1] = max(out[-1][1], end)
        else:
            out.append([start, end])
    return out
""",
    "matrix-spiral": """\
def spiral(matrix):
    out = []
    rows = [list(row) for row in matrix]
    while rows:
        out += rows.pop(0)
        rows = [list(row) for row in zip(*rows)][::-1]
    return out
""",
    "edit-distance": """\
def edit_distance(a, b):
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        last, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            last, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, last + (x != y))
    return row[-1]
""",
    "group-anagrams": """\
def group(words):
    out = {}
    for word in words:
        out.setdefault(tuple(sorted(word)), set()).add(word)
    return out
""",
    "triangle-area": """\
def area(a, b, c):
    s = (a + b + c) / 2
    square = s * (s - a) * (s - b) * (s - c)
    return None if square < 0 or min(a, b, c) < 0 else square ** 0.5
""",
    "topological-order": """\
def order(n, edges):
    before = {node: set() for node in range(n)}
    for a, b in edges:
        before[b].add(a)
    out = []
    while before:
        free = sorted(node for node, needs in before.items() if not needs)
        if not free:
            return []
        for node in free:
            del before[node]
            out.append(node)
        for needs in before.values():
            needs.difference_update(free)
    return out
""",
    "sum-of-two-squares": """\
import math
n = int(input())
for a in range(math.isqrt(n // 2) + 1):
    b = math.isqrt(n - a * a)
    if a * a + b * b == n:
        print(a, b)
        break
else:
    print('none')
""",
}
