"""Rewards of vision-language models: choices, boxes, points, and a judge that sees the prompt's picture."""

import asyncio
import base64
import io
import json
import threading
import time
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from cosmos_rl_core.errors import MediaError, UserError
from cosmos_rl_core.types import Prompt, Rollout, RolloutGroup
from cosmos_rl_llm.config import MediaSection
from cosmos_rl_llm.media.source import PromptMedia
from cosmos_rl_llm.rewards import REWARDS

Image = pytest.importorskip("PIL.Image")


def group_of(*texts, media=None, **row):
    empty = np.zeros(0)
    rollouts = tuple(
        Rollout(arrays={}, rollout_logprobs=empty, versions=empty, loss_mask=empty, text=text, media=media or {})
        for text in texts
    )
    return RolloutGroup(prompt=Prompt(sample_id=0, row=row), rollouts=rollouts)


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("B", 1),
        ("(b)", 1),
        ("B. a cup", 1),
        ("B: a cup", 1),
        ("The answer is (B).", 1),
        ("Answer: B", 1),
        ("<think>A? No.</think><answer>B</answer>", 1),
        ("<answer>A</answer> wait <answer>B</answer>", 1),
        ("<answer>A</answer>", 0),
        ("<answer>A or B</answer>", 0),
        ("(A) or (B)", 0),
        ("Bananas are yellow", 0),
        ("a cup", 0),
        ("", 0),
        ("<answer></answer>", 0),
        ("K", 0),
    ],
)
def test_a_choice_is_one_letter(text, reward):
    assert REWARDS["multiple_choice"]()(group_of(text, answer="B")) == [reward]
    assert REWARDS["multiple_choice"]()(group_of(text, answer="(B) a cup")) == [reward]


SEVERAL = [
    *("B, C", "B. or C.", "A, B, C, D", "b) or c)", "The answer is B or C", "(B) (C)", "B C", "B/C", "B and C"),
    *("B; C is possible", "either A or B", "B\nC", "A & B", "**B**, **C**", "The answer is B, or maybe C"),
    *("options B and D", "[b] [c]"),
]
ONE = [
    *("I think B", "I choose (B)", "b. a cup", "B. Vitamin C", "B) the cup of box A", "**B**", "It's B.", "[b]"),
    *("The answer is b", "A cup, so B", "B, as A is a spoon", "Option B: a cup", "I'd say B", "B - a bottle"),
    "the correct option is (B) a cup",
]


@pytest.mark.parametrize("text", SEVERAL)
def test_several_letters_are_no_choice(text):
    rewards = [REWARDS["multiple_choice"]()(group_of(text, answer=letter))[0] for letter in "ABCD"]
    assert rewards == [0, 0, 0, 0]


@pytest.mark.parametrize("text", ONE)
def test_words_beside_the_letter_are_no_other_choice(text):
    assert REWARDS["multiple_choice"]()(group_of(text, answer="B")) == [1]
    assert REWARDS["multiple_choice"]()(group_of(text, answer="C")) == [0]


def test_a_response_may_repeat_a_reference_with_other_letters():
    group = group_of("A. Move A,\nB", "A", "A, B", answer="A. Move A, B")
    assert REWARDS["multiple_choice"]()(group) == [1, 1, 0]


@pytest.mark.parametrize("text", ["a cup", "A cup", "I see a cup", "vitamin C", "BD", "", "don't"])
def test_words_alone_are_no_choice(text):
    rewards = [REWARDS["multiple_choice"]()(group_of(text, answer=letter))[0] for letter in "ABCDI"]
    assert rewards == [0] * 5


def test_a_reference_without_a_letter_is_an_error():
    with pytest.raises(UserError, match="'a cup' has no letter of an option"):
        REWARDS["multiple_choice"]()(group_of("B", answer="a cup"))


def test_the_format_of_cosmos_reason_is_the_default():
    texts = ["<think>x</think>\n<answer>B</answer>", "<answer>B</answer>", "<think>x<answer>B</answer>"]
    assert REWARDS["format"](whole=True)(group_of(*texts)) == [1, 0, 0]


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("[0, 0, 10, 10]", 1),
        ('```json\n[{"bbox_2d": [0, 0, 10, 5], "label": "cup"}]\n```', 0.5),
        ("<think>[50, 50, 60, 60]</think><answer>[[0.0, 0.0, 10.0, 10.0]]</answer>", 1),
        ("[0, 0, 10, 10] [0, 0, 10, 10]", 0.5),
        ("[20, 20, 30, 30]", 0),
        ("[10, 10, 0, 0]", 0),
        ("[0, 0, 10]", 0),
        ("none", 0),
    ],
)
def test_boxes_are_rewarded_by_their_overlap(text, reward):
    assert REWARDS["iou"]()(group_of(text, boxes=[0, 0, 10, 10])) == [pytest.approx(reward)]


def test_boxes_are_matched_one_to_one():
    boxes = [[0, 0, 10, 10], [20, 0, 30, 10]]
    both = "[20, 0, 30, 10], [0, 0, 10, 8]"
    assert REWARDS["iou"]()(group_of(both, "[0, 0, 10, 10]", boxes=boxes)) == pytest.approx([0.9, 0.5])
    assert REWARDS["iou"](threshold=0.9)(group_of(both, boxes=boxes)) == [0.5]


def test_a_response_that_repeats_boxes_without_end_has_no_reward_and_takes_no_time():
    boxes = [[i, 0, i + 10, 10] for i in range(1000)]
    began = time.thread_time()
    assert REWARDS["iou"]()(group_of("[0, 0, 10, 10]" * 20_000, boxes=boxes)) == [0]
    assert time.thread_time() - began < 1.0  # comparing them takes a minute
    assert REWARDS["iou"]()(group_of("[0, 0, 10, 10]" * 1000, boxes=boxes))[0] > 0


def test_units_of_the_picture_become_pixels():
    picture = np.zeros((100, 200, 3), np.uint8)
    group = group_of("[0, 0, 500, 500]", media={"image": picture}, boxes=[0, 0, 100, 50])
    assert REWARDS["iou"](scale=1000)(group) == [1]
    with pytest.raises(UserError, match="need the prompt's picture"):
        REWARDS["iou"](scale=1000)(group_of("[0, 0, 500, 500]", boxes=[0, 0, 100, 50]))


def test_pixels_that_the_model_sees_become_those_of_the_picture():
    """A picture of 200 x 100 in 5 x 10 patches of 14, which is 140 x 70."""
    group = group_of("[14, 7, 28, 14]", media={"image": np.zeros((100, 200, 3), np.uint8)}, boxes=[20, 10, 40, 20])
    arrays = {"item_grid": np.array([[1, 5, 10], [1, 2, 2]], np.int32)}
    group = replace(group, rollouts=tuple(replace(rollout, arrays=arrays) for rollout in group.rollouts))
    assert REWARDS["iou"](patch=14)(group) == [pytest.approx(1)]
    assert REWARDS["iou"]()(group)[0] < 0.2
    assert REWARDS["point"](patch=14, column="boxes")(group) == [0]
    with pytest.raises(ValueError, match="scale and patch are two units"):
        REWARDS["iou"](patch=14, scale=1000)
    with pytest.raises(UserError, match="need the prompt's picture"):
        REWARDS["iou"](patch=14)(group_of("[0, 0, 1, 1]", boxes=[0, 0, 1, 1]))


@pytest.mark.parametrize("boxes", [[1, 2, 3], "[0, 0, 1, 1]", [[0, 0, 1, 1], [0]], [], None])
def test_a_row_without_boxes_is_an_error(boxes):
    with pytest.raises(UserError, match="column 'boxes' must have 4 numbers"):
        REWARDS["iou"]()(group_of("[0, 0, 1, 1]", boxes=boxes))


@pytest.mark.parametrize(
    ("text", "in_box", "by_distance"),
    [
        ("[5, 5]", 1, 1),
        ("(5, 10)", 1, 0.5),
        ('<point x="5" y="15">cup</point>', 0, 0),
        ("<answer>[5, 5]</answer>", 1, 1),
        ("[5, 5] or [80, 80]", 0, 0),
        ("5 5", 0, 0),
        ("", 0, 0),
    ],
)
def test_a_point_is_rewarded_by_its_place(text, in_box, by_distance):
    assert REWARDS["point"]()(group_of(text, point=[0, 0, 10, 10])) == [in_box]
    assert REWARDS["point"](radius=10)(group_of(text, point=[5, 5])) == [pytest.approx(by_distance)]


def test_media_of_a_prompt_are_decoded_when_they_are_read(tmp_path):
    Image.new("RGB", (4, 3), (255, 0, 0)).save(tmp_path / "a.png")
    parts = [{"type": "image", "image": "a.png"}, {"type": "image", "image": "gone.png"}, {"type": "text", "text": "?"}]
    found = PromptMedia({"prompt": [{"role": "user", "content": parts}]}, MediaSection(root=str(tmp_path)))
    assert found.locations == {"image": "a.png", "image_1": "gone.png"}
    assert found["image"].shape == (3, 4, 3) and found["image"] is found["image"]
    with pytest.raises(MediaError, match=r"gone\.png"):
        found["image_1"]
    assert not PromptMedia({"prompt": "text"}, MediaSection())


class Judge(BaseHTTPRequestHandler):
    """Replies with the next of `replies`, a status and a body, and keeps the requests."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.asked.append((self.path, self.headers.get("Authorization"), json.loads(body)))
        status, reply = self.server.replies.pop(0) if len(self.server.replies) > 1 else self.server.replies[0]
        content = reply.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass


def chat_reply(content):
    return json.dumps({"choices": [{"message": {"role": "assistant", "content": content}}]})


@pytest.fixture
def server():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Judge)
    server.asked, server.replies = [], []
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def judge(server, **keys):
    return REWARDS["judge"](url=f"http://127.0.0.1:{server.server_port}/v1", model="served", **keys)


def judged(reward, *texts, **row):
    picture = np.full((3, 4, 3), (255, 0, 0), np.uint8)
    media = {"image": picture, "video": np.stack([picture] * 5)}
    parts = [{"type": "image", "image": "a.png"}, {"type": "text", "text": "what colour ?"}]
    prompt = [{"role": "user", "content": parts}]
    return asyncio.run(reward(group_of(*texts, media=media, prompt=prompt, answer="{response}", **row)))


def test_a_judge_sees_picture_question_and_answer(server, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "secret")
    server.replies = [(200, chat_reply("I say 10 of 10: 7"))]
    assert judged(judge(server, key_variable="JUDGE_KEY", max_frames=2), "red", "blue") == [0.7, 0.7]
    path, key, body = server.asked[0]
    assert (path, key, body["model"]) == ("/v1/chat/completions", "Bearer secret", "served")
    *pictures, text = body["messages"][0]["content"]
    assert len(pictures) == 3  # the picture and two frames
    header, _, content = pictures[0]["image_url"]["url"].partition(",")
    assert header == "data:image/png;base64"
    assert Image.open(io.BytesIO(base64.b64decode(content))).getpixel((0, 0)) == (255, 0, 0)
    asked = {body["messages"][0]["content"][-1]["text"] for _, _, body in server.asked}
    assert len(asked) == 2 and "what colour ?" in text["text"] and "Reference answer: {response}" in text["text"]


def test_a_busy_judge_is_asked_again(server):
    server.replies = [(503, "busy"), (200, chat_reply("10"))]
    assert judged(judge(server, media=False), "red") == [1.0]
    assert [part["type"] for part in server.asked[-1][2]["messages"][0]["content"]] == ["text"]


@pytest.mark.parametrize(
    ("status", "reply", "reason"),
    [
        (200, chat_reply("very good"), "replied 'very good', no number from 0 to 10"),
        (200, chat_reply("11"), "replied '11', no number from 0 to 10"),
        (200, chat_reply("-1"), "replied '-1'"),
        (200, chat_reply(None), "returned an empty reply"),
        (200, '{"choices": []}', "returned an empty reply"),
        (200, "oops", "returned an invalid reply"),
        (404, "no such model", "returned 404 no such model"),
    ],
)
def test_a_reply_without_a_score_is_an_error(server, status, reply, reason):
    server.replies = [(status, reply)]
    with pytest.raises(Exception, match=reason) as error:
        judged(judge(server), "red")
    assert not isinstance(error.value, ConnectionError | TimeoutError)  # a retry of the sample would not help


def test_a_judge_that_is_away_is_worth_a_retry(server):
    server.replies = [(500, "broken")]
    with pytest.raises(ConnectionError, match=r"to answer; .* 500 broken"):
        judged(judge(server, deadline_s=0.5), "red")


def test_a_key_must_be_set(server, monkeypatch):
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    with pytest.raises(UserError, match="JUDGE_KEY"):
        judged(judge(server, key_variable="JUDGE_KEY"), "red")
