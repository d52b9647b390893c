"""The HTTP example: what it answers, what it refuses, that it streams."""

import json
import os
import pathlib
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest
from test_causal_lm import make_model

from favor_keras import export_text_model
from favor_keras.text import Characters

SCRIPT = pathlib.Path(__file__).parent.parent / "examples" / "serve.py"
CHARACTERS = Characters("abcdefg hij")


@pytest.fixture(scope="module")
def model():
    return make_model(mixer="gmlp", max_length=20, num_layers=1)


@pytest.fixture(scope="module")
def address(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    export_text_model(model, CHARACTERS, folder / "model")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, str(SCRIPT), str(folder / "model"), "--port", str(port), "--most-characters", "30"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    server = subprocess.Popen(command, env=environment, cwd=folder)
    try:
        address = f"http://127.0.0.1:{port}"
        wait_for(address, server)
        yield address
    finally:
        server.kill()
        server.wait()


def wait_for(address, server):
    for _ in range(240):
        assert server.poll() is None, "the server has ended"
        try:
            return urllib.request.urlopen(f"{address}/v1/models/char_lm").read()
        except urllib.error.URLError:
            time.sleep(0.5)
    raise TimeoutError(address)


def post(url, body):
    """Status and body of the answer."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data=data, method="POST")) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def greedy(model, prompt, number):
    return CHARACTERS.decode(model.generate(CHARACTERS.encode(prompt)[None], number, temperature=0)[0])


def test_text_comes_from_both_addresses(model, address):
    expected = greedy(model, "bad", 12)
    status, text = post(f"{address}/generate", {"prompt": "bad", "num_characters": 12, "temperature": 0})
    assert (status, "bad" + text) == (200, expected)
    inputs = {"prompt": ["bad"], "num_characters": 12, "temperature": 0.0, "seed": 1}
    url = f"{address}/v1/models/char_lm:predict"
    status, answer = post(url, {"signature_name": "generate", "inputs": inputs})
    assert (status, json.loads(answer)) == (200, {"outputs": {"text": [expected]}})
    status, answer = post(url, {"inputs": {"token_ids": [[1, 2, 3]]}})
    assert status == 200 and len(json.loads(answer)["outputs"]["logits"][0]) == 3


def test_the_same_seed_gives_the_same_text(address):
    request = {"prompt": "bad", "num_characters": 15, "temperature": 1.0}
    texts = [post(f"{address}/generate", {**request, "seed": seed})[1] for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2] and len(texts[0]) == 15


def test_characters_are_sent_one_by_one(address):
    data = json.dumps({"prompt": "bad", "num_characters": 12, "temperature": 0}).encode()
    host, port = address.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        head = f"POST /generate HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(data)}\r\nConnection: close\r\n\r\n"
        connection.sendall(head.encode() + data)
        raw = b"".join(iter(lambda: connection.recv(65536), b""))
    chunks = raw.split(b"\r\n\r\n", 1)[1].split(b"\r\n")
    assert chunks[0:24:2] == [b"1"] * 12, "one chunk of HTTP's chunked encoding per character"


@pytest.mark.parametrize(
    "body, expected",
    [
        (b"{not JSON", "JSON object"),
        (b"[1]", "JSON object"),
        ({}, "prompt must be a string that is not empty, received None"),
        ({"prompt": ""}, "prompt must be a string that is not empty"),
        ({"prompt": 5}, "received 5"),
        pytest.param({"prompt": 10_001 * "a"}, "prompt must have at most 10000 characters, received 10001", id="long"),
        ({"prompt": "bad?"}, "unknown characters: ?"),
        ({"prompt": "bad", "num_characters": 0}, "from 1 to 30, received 0"),
        ({"prompt": "bad", "num_characters": 31}, "from 1 to 30, received 31"),
        ({"prompt": "bad", "num_characters": 18}, "must not exceed 20 together, received 21"),
        ({"prompt": "bad", "temperature": -1}, "temperature must be"),
        ({"prompt": "bad", "seed": 0.5}, "seed must be a whole number"),
        ({"prompt": "bad", "size": 1}, "received also ['size']"),
    ],
    ids=str,
)
def test_bad_requests_are_explained(body, expected, address):
    status, answer = post(f"{address}/generate", body)
    assert status == 400 and expected in json.loads(answer)["error"]


@pytest.mark.parametrize(
    "body, expected",
    [
        ({"signature_name": "magic", "inputs": {}}, "signature_name must be one of"),
        ({"inputs": {"ids": [[1]]}}, "keys ['token_ids'], received ['ids']"),
        ({"inputs": {"token_ids": [[0.5]]}}, "token_ids must be int32"),
        ({"inputs": {"token_ids": [1]}}, "token_ids must have the shape (None, None), received (1,)"),
        ({"inputs": 3}, "received 3"),
        ({"inputs": {"token_ids": [[99]]}}, "the inputs do not fit the model: indices[0,0] = 99 is not in [0, 11)"),
    ],
    ids=str,
)
def test_bad_calls_of_signatures_are_explained(body, expected, address):
    status, answer = post(f"{address}/v1/models/char_lm:predict", body)
    assert status == 400 and expected in json.loads(answer)["error"]


@pytest.mark.parametrize(
    "path, body, status",
    [("/nope", {}, 404), ("/v1/models/char_lm", {}, 405), ("/generate", b" " * 1_000_001, 413)],
    ids=["missing", "not_allowed", "too_large"],
)
def test_what_is_not_a_request_gets_json_too(path, body, status, address):
    code, answer = post(address + path, body)
    assert code == status and json.loads(answer)["error"]


def test_a_folder_without_a_model_is_one_line(tmp_path):
    process = subprocess.run([sys.executable, str(SCRIPT), str(tmp_path)], capture_output=True, text=True)
    assert process.returncode == 2 and process.stderr.splitlines()[-1].startswith("serve.py: error: folder must be")
