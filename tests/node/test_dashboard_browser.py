"""The page in a real Chromium: what it shows, and that neither policy nor console has anything to complain of."""

from __future__ import annotations

import asyncio
import math
from contextlib import asynccontextmanager

import pytest
import trio
from browser_kit import browser_tab, find_browser
from dashboard_kit import BOB, HOSTILE, make_state, showing, train, write_answers, write_tokenizer

needs_browser = pytest.mark.skipif(find_browser() is None, reason="no Chromium on this machine")
STEPS = 10_000


async def look(url, profile, *, hostile_key):
    async with browser_tab(profile) as tab:
        await tab.resize(1280, 900)
        await tab.open(url)
        await tab.until("document.querySelector('.activity')?.textContent.startsWith('Waiting for <img')")
        await tab.until("document.querySelectorAll('#overview .chart .line').length >= 7")

        # Ten thousand steps, a few points a pixel, gaps where nothing was measured.
        points = await tab.run("document.querySelector('.line.main').getAttribute('d').length")
        assert 1000 < points < 60_000
        assert await tab.run("document.querySelectorAll('.line')[2].getAttribute('d').split('M').length") > 2
        assert "NaN" not in await tab.run("document.body.innerHTML")
        await tab.run("document.querySelector('.plot').focus()")
        await tab.call("Input.dispatchKeyEvent", type="keyDown", key="End")
        await tab.until(f"document.querySelector('.tip').textContent.includes('step {STEPS - 1}')")
        await tab.run("document.querySelector('details.data summary').click()")
        await tab.until("document.querySelectorAll('details.data tbody tr').length > 100")
        assert await tab.run("document.querySelectorAll('details.data tbody tr').length") <= 201

        await tab.run("location.hash = '#nodes'")
        await tab.until("document.querySelector('#nodes tbody').textContent.includes('toploc')")
        await tab.run("location.hash = '#verdicts'")
        await tab.until("document.querySelector('#verdicts tbody').textContent.includes('toploc: <img')")
        await tab.run("[...document.querySelectorAll('#verdicts button')].find(b => b.textContent == 'open').click()")
        await tab.until("document.querySelector('dialog[open] .check')")
        await tab.run("document.querySelector('dialog').close()")

        await tab.run(f"location.hash = '#rollouts/{hostile_key}'")
        await tab.until("document.querySelector('.answer')")
        assert HOSTILE in await tab.run("document.querySelector('.answers').textContent")
        assert not await tab.run("document.querySelectorAll('main img').length")
        assert "owned" not in await tab.run("document.title")

        await tab.resize(360, 800)
        for view in ("overview", "nodes", "verdicts", "rollouts", "node"):
            await tab.run(f"location.hash = '#{view}'")
            await tab.until(f"!document.getElementById('{view}').hidden")
            assert await tab.run("document.documentElement.scrollWidth") == 360, view
        assert tab.complaints == []


async def look_at_nothing(url, profile):
    async with browser_tab(profile) as tab:
        await tab.open(url)
        await tab.until("document.body.innerText.includes('ledger is still on its way')")
        assert tab.complaints == []


@needs_browser
async def test_the_page_in_a_real_browser(tmp_path):
    """Attack: an answer, a verdict's reason and an activity that are HTML with a script; ten thousand steps; NaN."""
    state = make_state()
    train(state, STEPS, staleness=1.0)
    for step in range(100, 300):
        state.trained[step].metrics["tokens"] = math.nan
    path = write_answers(tmp_path / "file", [([3, 2], 1.0), ([5, 2], 0.0)])
    key = next(key for key, one in state.submissions.items() if one.author == BOB.peer_id).hex()

    @asynccontextmanager
    async def obtain(key, submission):
        yield path

    with trio.fail_after(240):
        tokenizer = write_tokenizer(tmp_path / "policy")
        async with showing(tmp_path, state=state, obtain=obtain, tokenizer=tokenizer) as shown:
            shown.board.waiting(HOSTILE)
            await trio.to_thread.run_sync(lambda: asyncio.run(look(shown.url, tmp_path / "a", hostile_key=key)))


@needs_browser
async def test_a_node_that_has_nothing_to_show_says_so(tmp_path):
    with trio.fail_after(120):
        async with showing(tmp_path) as shown:
            await trio.to_thread.run_sync(lambda: asyncio.run(look_at_nothing(shown.url, tmp_path / "a")))
