# SPDX-License-Identifier: Apache-2.0
"""safetensors_edit.py -- safetensors files for tests, with Python alone: tensors as lists of floats."""
import array
import json
import os
import shutil
import struct


def read(path):
    """{name: (dtype, shape, bytes)} of a model.safetensors or adapter_model.safetensors."""
    with open(path, 'rb') as file:
        n, = struct.unpack('<Q', file.read(8))
        header = json.loads(file.read(n))
        data = file.read()
    header.pop('__metadata__', None)
    return {name: (t['dtype'], t['shape'], data[t['data_offsets'][0]:t['data_offsets'][1]])
            for name, t in header.items()}


def write(path, tensors):
    header, data = {'__metadata__': {'format': 'pt'}}, b''
    for name, (dtype, shape, raw) in sorted(tensors.items()):
        header[name] = {'dtype': dtype, 'shape': shape, 'data_offsets': [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    text += b' ' * (-len(text) % 8)
    with open(path, 'wb') as file:
        file.write(struct.pack('<Q', len(text)) + text + data)


def floats(tensor):
    dtype, _, raw = tensor
    if dtype == 'F32':
        return array.array('f', raw)
    assert dtype == 'BF16', dtype
    out = array.array('f')
    out.frombytes(b''.join(b'\0\0' + raw[i:i + 2] for i in range(0, len(raw), 2)))
    return out


def tensor(dtype, shape, values):
    """Rounded to nearest even."""
    raw = array.array('f', values).tobytes()
    if dtype == 'BF16':
        words = array.array('I', raw)
        raw = array.array('H', (((w + 0x7fff + (w >> 16 & 1)) >> 16) & 0xffff for w in words)).tobytes()
    return dtype, list(shape), raw


def copy(source, target, change=None, file='adapter_model.safetensors', config=None):
    """A directory with changed tensors (change(tensors)) and changed keys of adapter_config.json."""
    shutil.rmtree(target, ignore_errors=True)
    os.makedirs(target)
    for name in os.listdir(source):
        if os.path.isfile(os.path.join(source, name)):
            shutil.copy(os.path.join(source, name), target)
    path = os.path.join(target, file)
    if change:
        tensors = read(path)
        change(tensors)
        write(path, tensors)
    if config:
        path = os.path.join(target, 'adapter_config.json')
        with open(path) as stream:
            values = json.load(stream)
        values.update(config)
        with open(path, 'w') as stream:
            json.dump(values, stream)
