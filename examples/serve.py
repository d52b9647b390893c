"""Serve an exported character model over HTTP on this machine, without favor_keras.

    python examples/export_model.py runs/char_lm-python_docs-favor-1 exported
    python examples/serve.py exported

    curl -N localhost:8501/generate -d '{"prompt": "The ", "num_characters": 300, "temperature": 0.7, "seed": 1}'
    curl localhost:8501/v1/models/char_lm:predict -d '{"signature_name": "generate", "inputs": {
        "prompt": ["The "], "num_characters": 300, "temperature": 0.7, "seed": 1}}'

`/generate` sends the text character by character as it is written. The other has the form of TensorFlow
Serving's REST interface, for every signature of the model. Errors are JSON, {"error": "..."}, with status 400 for what
the model cannot do, 404, 405 or 413 for what is not there, not allowed or larger than a megabyte.
"""

import argparse
import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import flask  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402
import waitress  # noqa: E402
from werkzeug.exceptions import HTTPException  # noqa: E402

DEFAULTS = {"num_characters": 200, "temperature": 1.0, "seed": 0}
LONGEST_BODY = 1_000_000  # bytes
LONGEST_PROMPT = 10_000  # characters


class BadRequest(ValueError):
    """What a client has to be told."""


def make_app(folder, most_characters):
    """The Flask application that serves the SavedModel of a folder."""
    loaded = tf.saved_model.load(folder)  # kept alive by the functions below
    app = flask.Flask("char_lm")
    app.config["MAX_CONTENT_LENGTH"] = LONGEST_BODY

    @app.errorhandler(BadRequest)
    def refuse(error):
        return {"error": str(error)}, 400

    @app.errorhandler(HTTPException)
    def explain(error):
        return {"error": error.description}, error.code

    @app.get("/v1/models/char_lm")
    def status():
        return {"model_version_status": [{"version": "1", "state": "AVAILABLE"}], "signatures": list(loaded.signatures)}

    @app.post("/v1/models/char_lm:predict")
    def predict():
        request = read_request()
        name = request.get("signature_name", "serving_default")
        if name not in loaded.signatures:
            raise BadRequest(f"signature_name must be one of {sorted(loaded.signatures)}, received {name!r}")
        signature = loaded.signatures[name]
        inputs = tensors_of(request.get("inputs"), signature.structured_input_signature[1])
        if name == "generate":
            check_number("num_characters", int(inputs["num_characters"]), most_characters)
            check_prompts(text.decode("utf-8", "replace") for text in inputs["prompt"].numpy())
        return {"outputs": {key: to_json(tensor) for key, tensor in call(signature, **inputs).items()}}

    @app.post("/generate")
    def generate():
        request = read_request()
        if unknown := sorted(set(request) - {"prompt", *DEFAULTS}):
            raise BadRequest(f"the keys must be among prompt, {', '.join(DEFAULTS)}, received also {unknown}")
        options = {**DEFAULTS, "num_characters": min(DEFAULTS["num_characters"], most_characters), **request}
        prompt, number, temperature = (options.get(key) for key in ("prompt", "num_characters", "temperature"))
        if not isinstance(prompt, str) or not prompt:
            raise BadRequest(f"prompt must be a string that is not empty, received {prompt!r}")
        check_prompts([prompt])
        check_number("num_characters", number, most_characters)
        if not is_number(temperature, (int, float)) or not 0 <= temperature < float("inf"):
            raise BadRequest(f"temperature must be a number of at least 0, received {temperature!r}")
        if not is_number(options["seed"], int) or options["seed"] < 0:
            raise BadRequest(f"seed must be a whole number of at least 0, received {options['seed']!r}")
        encoded = call(loaded.signatures["encode"], text=tf.constant(prompt))
        length, limit = encoded["token_ids"].shape[1] + number, int(encoded["max_length"])
        if limit and length > limit:
            raise BadRequest(f"prompt and num_characters must not exceed {limit} together, received {length}")
        text = write(loaded.signatures, encoded["token_ids"], number, temperature, options["seed"])
        return flask.Response(text, mimetype="text/plain; charset=utf-8")

    return app


def write(signatures, token_ids, num_characters, temperature, seed):
    """An iterator over the characters after a prompt [1, T]."""
    generator = np.random.default_rng(seed)
    length = token_ids.shape[1] + num_characters
    takes_length = "max_length" in signatures["prefill"].structured_input_signature[1]
    answer = signatures["prefill"](token_ids=token_ids, **({"max_length": tf.constant(length)} if takes_length else {}))
    for _ in range(num_characters):
        logits = answer.pop("logits")[0].numpy().astype("float64")
        token = tf.constant([[draw(logits, temperature, generator)]], tf.int32)
        yield signatures["decode"](token_ids=token)["text"].numpy()[0]
        answer = signatures["decode_step"](token_ids=token, **answer)


def draw(logits, temperature, generator):
    if temperature == 0:
        return int(np.argmax(logits))
    weights = np.exp((logits - logits.max()) / temperature)
    return generator.choice(len(weights), p=weights / weights.sum())


def read_request():
    request = flask.request.get_json(force=True, silent=True)
    if not isinstance(request, dict):
        raise BadRequest("the body must be a JSON object")
    return request


def is_number(value, kinds):
    return isinstance(value, kinds) and not isinstance(value, bool)


def check_number(name, value, most):
    if not is_number(value, int) or not 1 <= value <= most:
        raise BadRequest(f"{name} must be a whole number from 1 to {most}, received {value!r}")


def check_prompts(prompts):
    length = max(map(len, prompts), default=0)
    if length > LONGEST_PROMPT:
        raise BadRequest(f"prompt must have at most {LONGEST_PROMPT} characters, received {length}")


def tensors_of(inputs, specs):
    """The inputs of a signature, as its specs say."""
    if not isinstance(inputs, dict) or set(inputs) != set(specs):
        received = sorted(inputs) if isinstance(inputs, dict) else inputs
        raise BadRequest(f"inputs must be an object with the keys {sorted(specs)}, received {received!r}")
    return {name: tensor_of(name, value, specs[name]) for name, value in inputs.items()}


def tensor_of(name, value, spec):
    try:
        tensor = tf.constant(value, spec.dtype)
    except (ValueError, TypeError) as error:
        raise BadRequest(f"{name} must be {spec.dtype.name} of shape {spec.shape}: {error}") from error
    if not spec.shape.is_compatible_with(tensor.shape):
        raise BadRequest(f"{name} must have the shape {spec.shape}, received {tensor.shape}")
    return tensor


def to_json(tensor):
    array = tensor.numpy()
    return [text.decode("utf-8") for text in array] if array.dtype == object else array.tolist()


def call(signature, **inputs):
    try:
        return signature(**inputs)
    except tf.errors.InvalidArgumentError as error:
        raise BadRequest(reason_of(error.message)) from error


def reason_of(message):
    """The line of TensorFlow's message that is of use to a client."""
    lines = [line.strip() for line in message.splitlines() if line.strip() and "{{node" not in line]
    for line in lines:
        if line.startswith("assertion failed: "):
            return line.removeprefix("assertion failed: ").replace("[", "").replace("]", "")
    return f"the inputs do not fit the model: {lines[-1]}"


def main(argv=None):
    parser = argparse.ArgumentParser(
        description="Serve an exported character model over HTTP.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("folder", help="SavedModel that export_model.py has written")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; the default is this machine only")
    parser.add_argument("--port", type=int, default=8501, help="port to listen on")
    parser.add_argument("--most-characters", type=int, default=2000, help="the most that a request may ask for")
    args = parser.parse_args(argv)
    if not tf.saved_model.contains_saved_model(args.folder):
        parser.exit(2, f"serve.py: error: folder must be a SavedModel of export_model.py, received {args.folder!r}\n")
    print(f"serving {args.folder} on http://{args.host}:{args.port}", flush=True)
    waitress.serve(make_app(args.folder, args.most_characters), host=args.host, port=args.port, _quiet=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
