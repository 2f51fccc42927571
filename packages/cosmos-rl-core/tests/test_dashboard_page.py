"""The dashboard's page in a browser: what a person reads on each view, by keyboard too.

Needs a Chromium and the package playwright, which `make setup` does not install.
"""

import re
import shutil
import socket
import threading
from dataclasses import replace

import numpy as np
import pytest
import uvicorn
from run_files import group, tool_group, write_run

from cosmos_rl_core.observe.gallery import Gallery
from cosmos_rl_core.observe.rollouts import write_rollouts
from cosmos_rl_core.observe.sinks import JsonLines
from cosmos_rl_core.ops.dashboard.app import Runs, build_app
from cosmos_rl_core.ops.dashboard.guard import Guard
from cosmos_rl_core.types import Exchange, Prompt

playwright = pytest.importorskip("playwright.sync_api", reason="the package playwright is not installed")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
TOKEN = "a-token-of-a-test"
pytestmark = [
    pytest.mark.ci,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    made = tmp_path_factory.mktemp("runs")
    write_run(made / "good")
    write_run(made / "broken", state="failed", rate=0.1)
    shown = group(0, right=1.0)
    frames = np.zeros((6, 16, 16, 3), np.uint8)
    rollouts = tuple(replace(rollout, media={"video": frames}) for rollout in shown.rollouts)
    Gallery(made / "broken" / "media").save(0, replace(shown, rollouts=rollouts))
    return made


@pytest.fixture(scope="module")
def site(directory):
    """Serves the runs; yields the address."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    app = Guard(build_app(Runs([directory])), token=TOKEN, port=port)
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    yield f"http://127.0.0.1:{port}"
    server.should_exit = True
    thread.join()


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def page(browser, site):
    """A page with the cookie; its errors fail the test."""
    context = browser.new_context(base_url=site)
    opened = context.new_page()
    opened.set_default_timeout(60_000)
    errors = []
    opened.on("pageerror", lambda error: errors.append(str(error)))
    opened.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    opened.goto(f"/?token={TOKEN}")
    yield opened
    context.close()
    assert errors == []


def read(page, address, text):
    """Open a view, wait until it shows `text`, and return all that a person reads."""
    page.goto(f"/#/run/{address}")
    playwright.expect(page.locator("main")).to_contain_text(text, timeout=60_000)
    return page.locator("main").inner_text()


def test_the_list_has_each_run_with_its_state_and_compares_two(page):
    playwright.expect(page.locator("tbody tr")).to_have_count(2)
    rows = {row.split()[0]: row for row in page.locator("tbody tr").all_inner_texts()}
    assert "done" in rows["good"] and "20 / 20" in rows["good"] and "0.1 → 0.9" in rows["good"]
    assert "failed" in rows["broken"]
    for box in page.get_by_role("checkbox").all():
        box.check()
    page.get_by_role("button", name="Compare 2 runs").click()
    playwright.expect(page.locator("main h1")).to_have_text("2 runs")
    names = page.get_by_role("navigation").get_by_role("link").all_inner_texts()
    assert names == ["Curves", "Recipe"]


def test_the_list_is_filtered_and_sorted_by_keyboard_too(page):
    rows = page.locator("tbody tr")
    playwright.expect(rows).to_have_count(2)
    page.get_by_role("searchbox", name="Filter runs").fill("FAIL broken")
    playwright.expect(rows).to_have_count(1)
    assert "1 of 2 runs" in page.locator("main").inner_text()
    page.get_by_role("searchbox", name="Filter runs").fill("none of them")
    playwright.expect(page.locator("main")).to_contain_text("No run matches.")
    page.get_by_role("searchbox", name="Filter runs").fill("")
    for direction, first in (("ascending", "broken"), ("descending", "good")):
        page.get_by_role("button", name="Sort by run").press("Enter")
        playwright.expect(rows.first).to_contain_text(first)
        playwright.expect(page.locator("th").filter(has_text="run").first).to_have_attribute("aria-sort", direction)
        playwright.expect(page.get_by_role("button", name="Sort by run")).to_be_focused()
    page.get_by_role("button", name="Sort by run").click()
    playwright.expect(page.locator("th[aria-sort]")).to_have_count(0)


def test_media_have_a_tab_where_there_are_some(page):
    tabs = page.get_by_role("navigation")
    read(page, "broken/curves", "reward_mean")
    playwright.expect(tabs.get_by_role("link", name="Media")).to_be_visible()
    read(page, "good/curves", "reward_mean")
    playwright.expect(page.locator("#life")).to_contain_text("done")  # the run's state has come, with what it has
    assert "Media" not in tabs.get_by_role("link").all_inner_texts()
    read(page, "good/media", "No pictures")
    playwright.expect(tabs.get_by_role("link", name="Media")).to_be_visible()


def test_curves_begin_with_the_state_of_the_run_and_the_key_to_change(page):
    text = read(page, "good/curves", "reward_mean")
    assert "The run is done: 20 steps." in text
    assert "Both sides wait, the policy 55%" in text and "change sync.max_staleness" in text
    assert [re.search(rf"{name}\n+(\S+)", text)[1] for name in ("steps", "held-out reward")] == ["20", "0.1"]
    for section in ("Learning", "Held-out", "Health", "Speed"):
        assert page.get_by_role("heading", name=section).is_visible()
    chart = page.get_by_role("group", name=re.compile("^reward_mean: now 1; from 0.05 to 1"))
    assert chart.locator("canvas").is_visible()


def test_a_failed_run_shows_its_error_traceback_and_the_command_that_continues(page):
    text = read(page, "broken/curves", "The run failed")
    assert "The run failed in policy-0 after 20 steps: policy-0: RuntimeError: no." in text
    assert "cosmos-rl run a.toml --resume auto" in text
    page.get_by_text("Traceback", exact=True).click()
    playwright.expect(page.locator("pre.log")).to_contain_text("RuntimeError: no")


def test_a_chart_is_read_and_a_step_opened_by_keyboard(page):
    read(page, "good/curves", "reward_mean")
    chart = page.get_by_role("group", name=re.compile("^reward_mean"))
    chart.focus()
    playwright.expect(chart.locator("canvas")).to_be_visible()
    for _ in range(3):
        chart.press("ArrowRight")
    playwright.expect(chart.locator(".value")).to_have_text("2: 0.15")
    chart.press("Enter")
    playwright.expect(page.locator("main h1")).to_have_text("Rollouts of step 2")


def test_rollouts_are_read_filtered_and_followed_through_time(page):
    text = read(page, "good/rollouts?step=9", "Rollouts of step 9")
    playwright.expect(page.locator("article")).to_have_count(3)
    text = page.locator("article").nth(1).inner_text()
    assert "1 + 1 =" in text and "×2" in text and "advantage 0.5" in text and "2 terms, version 1" in text
    assert "<b>2</b>" in text  # text of the model is never markup
    token = page.locator("article").first.locator(".token").first
    playwright.expect(token).to_have_text("2")
    playwright.expect(token).to_have_attribute("title", re.compile('^"2": probability 0.368, version 1, advantage '))
    page.get_by_role("combobox", name="Colour of tokens").select_option("advantage")
    playwright.expect(token).to_have_class(re.compile("[gn]4"))
    first = page.get_by_role("group", name="2 tokens; arrow keys read them one by one").first
    first.press("ArrowRight")
    playwright.expect(page.locator("article").first).to_contain_text("version 1, advantage")
    page.get_by_role("button", name="reward 0.95 to 1: 6 rollouts").click()
    playwright.expect(page.get_by_text("6 of 12 rollouts")).to_be_visible()
    search = page.get_by_role("searchbox", name="Filter by text")
    search.fill("2 + 1")
    search.press("Enter")
    playwright.expect(page.locator("article")).to_have_count(1)
    page.get_by_role("button", name="Through time").click()
    through = page.get_by_role("region", name="One prompt through time")
    playwright.expect(through).to_contain_text("20 groups")
    playwright.expect(through.get_by_role("link")).to_have_count(20)
    page.locator("main h1").click()
    page.keyboard.press("k")
    playwright.expect(page.locator("main h1")).to_have_text("Rollouts of step 8")


def test_the_messages_of_a_chat_have_their_roles(page, directory):
    path = write_run(directory / "chats", steps=2)
    messages = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": [{"type": "image", "image": "a.png"}, {"type": "text", "text": "<i>What</i>?"}]},
    ]
    shown = group(0, right=1.0)
    row = {"prompt": messages}
    asked = replace(shown, prompt=Prompt(sample_id=0, row=row), prompt_text="<s>Be short.</s><u>[image] What?</u>")
    write_rollouts(path / "rollouts", step=1, groups=[asked, group(1, right=0.5)])
    page.reload()
    read(page, "chats/rollouts?step=1", "Rollouts of step 1")
    playwright.expect(page.locator("article")).to_have_count(2)
    first, second = page.locator("article").all()
    assert first.locator(".turns dt").all_inner_texts() == ["system", "user"]
    assert first.locator(".turns dd").all_inner_texts() == ["Be short.", "[image] <i>What</i>?"]
    playwright.expect(first.get_by_text("<s>Be short.</s>")).not_to_be_visible()
    first.get_by_text("as the model saw it").click()
    playwright.expect(first.get_by_text("<s>Be short.</s>")).to_be_visible()
    assert second.locator(".turns").count() == 0 and "1 + 1 =" in second.inner_text()


def test_an_episode_is_read_turn_by_turn(page, directory):
    path = write_run(directory / "agents", steps=2)
    (answered, *_), exchange = group(1, right=0.5).rollouts, Exchange(text="again")
    many_turns = replace(group(1, right=0.5), rollouts=(replace(answered, exchanges=(exchange,) * 12),))
    texts = {"term_texts": lambda rollout: [rollout.text, "."], "term_groups": 1}
    write_rollouts(path / "rollouts", step=1, groups=[tool_group(0), many_turns], **texts)
    page.reload()
    read(page, "agents/rollouts?step=1", "Rollouts of step 1")
    first = page.locator("article").first
    turns = first.get_by_role("list", name="3 turns").get_by_role("listitem")
    playwright.expect(turns).to_have_count(3)
    assert turns.nth(0).inner_text().split("\n") == [
        "turn 1 · model 120 ms · environment 1.5 s · calls 1 · reward 0",
        "thoughts",
        "call",
        'calculator {"expression": "17 * 23"}',
        "tool calculator",
        "391",
    ]
    turns.nth(0).get_by_text("thoughts").click()
    playwright.expect(turns.nth(0).get_by_text("I should not guess.")).to_be_visible()
    second = turns.nth(1).inner_text()
    assert "Let me <i>look</i> it up." in second and "not a call: the arguments are not JSON" in second
    playwright.expect(turns.nth(1).get_by_text("line 199 of a long page")).not_to_be_visible()
    turns.nth(1).get_by_text("4,689 characters").click()
    playwright.expect(turns.nth(1).get_by_text("line 199 of a long page")).to_be_visible()
    assert "history 2: what came before was rewritten" in turns.nth(2).inner_text()
    playwright.expect(first.get_by_role("list", name="1 turn")).to_have_count(1)
    assert "×2" in first.inner_text()  # equal episodes once
    playwright.expect(first.locator(".token").first).not_to_be_visible()
    first.get_by_text("tokens, as the model saw them").first.click()
    playwright.expect(first.locator(".token").first).to_be_visible()
    many = page.locator("article").nth(1).get_by_role("list", name="12 turns")
    playwright.expect(many.get_by_text("turn 10 ·")).to_be_visible()
    playwright.expect(many.get_by_text("turn 5 ·")).not_to_be_visible()
    many.get_by_text("6 more turns").click()
    playwright.expect(many.get_by_text("turn 5 ·")).to_be_visible()
    search = page.get_by_role("searchbox", name="Filter by text")
    search.fill("line 150 OF a long")
    search.press("Enter")
    playwright.expect(page.locator("article")).to_have_count(1)


def test_the_timeline_has_lanes_and_says_where_the_time_went(page):
    text = read(page, "good/timeline", "wait for batch")
    for words in ("policy-0", "rollout-0", "groups in flight", "55 %", "forward_backward"):
        assert words in text
    assert page.get_by_role("img", name=re.compile("rollout-0, groups in flight: up to 1 at once")).is_visible()
    before = page.get_by_text(re.compile("of 36.2 s")).inner_text()
    page.keyboard.press("+")
    playwright.expect(page.get_by_text(re.compile("of 36.2 s"))).not_to_have_text(before)


def test_members_waits_weights_recipe_and_logs_are_read(page):
    text = read(page, "good/members", "policy-0")
    assert "trained" in text and "57" in text and "Nobody waits." not in text
    assert "policy-0 waits for 3 groups of batch 4" in text
    assert re.search(r"policy-0\s+for batch\s+–\s+20\.0 s\s+55 %", text), text
    assert re.search(r"rollout-1\s+rollout\s+joining reading weights 4\.0 s", text)
    text = read(page, "good/weights", "rollout-0")
    assert "4.0 MB" in text and "80.0 MB" in text and "100 ms" in text and "210 ms" in text
    text = read(page, "good/machines", "node-a")
    assert "8 processors, 64.0 GB of memory, disk of 1.0 TB, 2 × H100, 80.0 GB" in text
    assert re.search(r"policy-0\s+node-a\s+3\s+1.5\s+20.0 GB\s+20.0 GB\s+rollout-0\s+node-a\s+3\s+1.5\s+10.0 GB", text)
    for name in (
        "processors busy: now 6",
        "GPUs busy, share of the time: now 0.9 and 0.9",
        "sent, bytes a second: now 5.0",
    ):
        assert page.get_by_role("group", name=re.compile(f"^{name}")).is_visible()
    text = read(page, "good/recipe", "run.domain")
    assert '"grpo"' in text and "abc123" not in text
    assert "ready at version 0" in read(page, "good/logs", "policy-0.log")
    assert "media_every" in read(page, "good/media", "No pictures")


def test_videos_are_played_among_the_media_and_beside_their_rollouts(page):
    read(page, "broken/media", "0 + 1 =")
    page.get_by_role("button", name="Play: 0 + 1 =").click()
    playwright.expect(page.get_by_role("button", name="Pause: 0 + 1 =")).to_be_visible()
    assert page.locator("video").evaluate("video => !video.paused && video.muted && !video.controls")
    read(page, "broken/rollouts?step=3", "Rollouts of step 3")
    playwright.expect(page.locator("article").first.locator("video")).to_have_count(1)
    playwright.expect(page.locator("video")).to_have_count(1)


def test_recipes_side_by_side_show_only_their_differences(page):
    text = read(page, "good+broken/recipe", "learning_rate")
    assert "0.001" in text and "0.1" in text and "max_steps" not in text


def test_a_live_run_moves_without_a_reload(page, directory):
    path = write_run(directory / "moving", state="live")
    page.reload()
    text = read(page, "moving/curves", "reward_mean")
    assert re.search(r"steps\n+20", text)
    metrics = JsonLines(path / "metrics.jsonl")
    for step in range(20, 30):
        metrics.log(step, {"reward_mean": 0.5})
    metrics.close()
    playwright.expect(page.locator("dl.stats dd").first).to_have_text("30", timeout=60_000)


def test_a_new_run_appears_in_the_list_and_a_focused_chart_keeps_the_keyboard(page, directory):
    path = write_run(directory / "later", state="live")
    row = page.get_by_role("link", name="later")
    playwright.expect(row).to_be_visible(timeout=60_000)
    read(page, "later/curves", "reward_mean")
    page.get_by_role("group", name=re.compile("^reward_mean: now 1;")).focus()
    metrics = JsonLines(path / "metrics.jsonl")
    metrics.log(20, {"reward_mean": 0.5})
    metrics.close()
    redrawn = page.get_by_role("group", name=re.compile("^reward_mean: now 0.5;"))
    playwright.expect(redrawn).to_be_focused(timeout=60_000)


def test_a_log_that_is_read_stays_where_it_is_while_it_grows(page, directory):
    path = write_run(directory / "growing", state="live")
    log = path / "logs" / "policy-0.log"
    log.write_text("".join(f"line {i}\n" for i in range(400)))
    read(page, "growing/logs", "line 399")
    pre = page.get_by_label("policy-0.log")
    assert pre.evaluate("pre => pre.scrollTop + pre.clientHeight >= pre.scrollHeight - 4")
    pre.evaluate("pre => { pre.scrollTop = 100 }")
    with log.open("a") as file:
        file.write("the newest line\n")
    metrics = JsonLines(path / "metrics.jsonl")
    metrics.log(20, {"reward_mean": 0.5})
    metrics.close()
    playwright.expect(pre).to_contain_text("the newest line", timeout=60_000)
    assert pre.evaluate("pre => pre.scrollTop") == 100


def test_the_page_fits_a_phone_and_has_a_dark_theme(page):
    read(page, "good/recipe", "run.domain")
    assert page.locator("td.key").first.bounding_box()["height"] < 40, "a key is in one line"
    page.set_viewport_size({"width": 390, "height": 800})
    shown = {
        **{
            "curves": "reward_mean",
            "rollouts": "advantage",
            "timeline": "forward_backward",
            "members": "Who waits for whom",
        },
        **{"weights": "bytes a version", "machines": "node-a", "recipe": "run.domain", "logs": "policy-0.log"},
    }
    for view, text in shown.items():
        read(page, f"good/{view}", text)
        width = page.evaluate("document.documentElement.scrollWidth")
        assert width <= 390, f"{view} is {width} pixels wide"
        tab = page.locator("nav a[aria-current]").bounding_box()
        assert tab["x"] >= 0 and tab["x"] + tab["width"] <= 390, f"the tab of {view} is at {tab}"
        cut = page.evaluate("[...document.querySelectorAll('.scroll')].some(box => box.scrollWidth > box.clientWidth)")
        assert not cut or view not in ("recipe", "timeline"), f"a table of {view} is cut off"
    read(page, "good/recipe", "run.domain")
    assert page.locator("td.key").first.bounding_box()["width"] > 120
    before = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.keyboard.press("t")
    playwright.expect(page.locator("html")).to_have_attribute("data-theme", "dark")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before


@pytest.mark.parametrize(
    ("view", "text"),
    [("curves", "reward_mean"), ("rollouts", "Rollouts of step"), ("timeline", "wait for batch"), ("logs", "policy-0")],
)
def test_every_control_has_a_name(page, view, text):
    read(page, f"good/{view}", text)
    unnamed = page.evaluate(
        """[...document.querySelectorAll('button, input, select, canvas, video, img')].filter(element =>
        !(element.getAttribute('aria-label') || element.textContent.trim() || element.alt ||
        element.closest('[aria-hidden], label'))).length"""
    )
    assert unnamed == 0


def test_the_views_have_keys(page):
    read(page, "good/rollouts", "Rollouts of step")
    page.locator("main h1").click()
    page.keyboard.press("3")
    playwright.expect(page.locator("main h1")).to_have_text("Timeline")
    page.keyboard.press("?")
    playwright.expect(page.get_by_role("dialog", name="Keyboard")).to_be_visible()
