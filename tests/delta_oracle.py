"""The delta rule token by token in float64 NumPy, with its gradients derived by hand."""

import numpy as np


def delta_rule(query, key, value, beta, log_decay=None, initial_state=None):
    """The output [B, T, H, D] and the final state [B, H, K, D]."""
    state, outputs = _start(key, value, initial_state), []
    for t in range(key.shape[1]):
        if log_decay is not None:
            state = state * np.exp(log_decay[:, t])[..., None, None]
        error = value[:, t] - _read(state, key[:, t])
        state = state + _outer(key[:, t], beta[:, t, :, None] * error)
        outputs.append(_read(state, query[:, t]))
    return np.stack(outputs, axis=1), state


def delta_rule_gradients(d_output, d_state, query, key, value, beta, log_decay=None, initial_state=None):
    """The gradients of sum(d_output * output) + sum(d_state * final state), by the arguments' names."""
    decay = np.exp(np.zeros_like(beta) if log_decay is None else log_decay)
    states = [_start(key, value, initial_state)]
    for t in range(key.shape[1]):
        token = slice(t, t + 1)
        gate = None if log_decay is None else log_decay[:, token]
        states.append(delta_rule(query[:, token], key[:, token], value[:, token], beta[:, token], gate, states[-1])[1])
    gradients = {name: np.zeros_like(x) for name, x in (("query", query), ("key", key), ("value", value))}
    gradients |= {"beta": np.zeros_like(beta), "log_decay": np.zeros_like(beta)}
    for t in reversed(range(key.shape[1])):
        k, q, b, a = key[:, t], query[:, t], beta[:, t, :, None], decay[:, t, :, None, None]
        faded = a * states[t]
        error = value[:, t] - _read(faded, k)
        gradients["query"][:, t] = _write_back(states[t + 1], d_output[:, t])
        d_state = d_state + _outer(q, d_output[:, t])
        d_update = _read(d_state, k)
        d_error = b * d_update
        gradients["value"][:, t] = d_error
        gradients["beta"][:, t] = np.sum(d_update * error, axis=-1)
        gradients["key"][:, t] = _write_back(d_state, b * error) - _write_back(faded, d_error)
        d_faded = d_state - _outer(k, d_error)
        gradients["log_decay"][:, t] = np.sum(d_faded * faded, axis=(-2, -1))
        d_state = a * d_faded
    return gradients | {"initial_state": d_state}


def _start(key, value, initial_state):
    if initial_state is not None:
        return initial_state
    return np.zeros((key.shape[0], *key.shape[2:], value.shape[3]))


def _read(state, address):
    """S^T k."""
    return np.einsum("bhkd,bhk->bhd", state, address)


def _write_back(state, value):
    """S v."""
    return np.einsum("bhkd,bhd->bhk", state, value)


def _outer(address, value):
    return np.einsum("bhk,bhd->bhkd", address, value)
