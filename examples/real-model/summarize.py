# SPDX-License-Identifier: Apache-2.0
"""summarize.py DIR: what examples/real-model/run left in DIR, as a table in Markdown.

For tools/plot: losses in DIR/loss.tsv; relative differences from PEFT's in DIR/difference.tsv, where the run compared them.
"""
import hashlib
import json
import os
import re
import statistics
import sys

FORMATS = 'fp8_row', 'stored'
MEAN_OF = 10  # steps of a point of the curve: two rows per step scatter


def read_lines(path):
    with open(path) as file:
        return [json.loads(line) for line in file]


def mean_of_last(losses):
    return statistics.fmean(losses[-MEAN_OF:])


def points_size(steps):
    """The steps of a point: of a short run, one."""
    return MEAN_OF if len(steps) >= 4 * MEAN_OF else 1


def curve(label, steps):
    size = points_size(steps)
    for first in range(0, len(steps) - size + 1, size):
        part = steps[first:first + size]
        yield '%s\t%g\t%.9f\n' % (label, statistics.fmean(s['step'] for s in part), statistics.fmean(s['loss'] for s in part))


def memory_line(path):
    with open(path) as file:
        found = re.findall(r'^memory measured: (.*)$', file.read(), re.M)
    return found[-1] if found else 'not in the log'


def sha256(directory, way):
    with open(os.path.join(directory, way, 'adapter_model.safetensors'), 'rb') as file:
        return hashlib.sha256(file.read()).hexdigest()[:16]


def column(directory, base_format, loss_points, difference_points):
    lines = read_lines(os.path.join(directory, base_format, 'metrics.jsonl'))
    steps = [line for line in lines if 'loss' in line]
    losses = [step['loss'] for step in steps]
    evals = [line['eval_loss'] for line in lines if 'eval_loss' in line and line.get('base_format', base_format) == base_format]
    loss_points.writelines(curve('%s: Ballast' % base_format, steps))
    cells = {
        'validation loss, base': '%.4f' % evals[0],
        'validation loss, with the adapter': '%.4f' % evals[-1],
        'training loss, mean of the first %d steps' % min(MEAN_OF, len(losses)): '%.4f' % statistics.fmean(losses[:MEAN_OF]),
        'training loss, mean of the last %d steps' % min(MEAN_OF, len(losses)): '%.4f' % mean_of_last(losses),
        'tokens/s, all steps': '%.0f' % (sum(s['tokens'] for s in steps) / sum(s['step_s'] for s in steps)),
        'tokens/s, median step': '%.0f' % statistics.median(s['tokens_per_s'] for s in steps),
        'memory': memory_line(os.path.join(directory, base_format + '.log')),
    }
    peft = os.path.join(directory, 'peft-%s.jsonl' % base_format)
    if os.path.exists(peft):
        theirs = read_lines(peft)
        loss_points.writelines(curve('%s: PEFT in fp32' % base_format, theirs))
        differences = [abs(a['loss'] / b['loss'] - 1) for a, b in zip(steps, theirs)]
        size = points_size(steps)
        difference_points.writelines('%s: largest of %d steps\t%d\t%.3g\n' % (base_format, size, i + size, max(differences[i:i + size]))
                                     for i in range(0, len(differences) - size + 1, size))
        cells['loss per step, largest relative difference from PEFT'] = '%.1e' % max(differences)
    return cells


def main():
    directory = sys.argv[1]
    with open(os.path.join(directory, 'loss.tsv'), 'w') as losses, open(os.path.join(directory, 'difference.tsv'), 'w') as differences:
        columns = [column(directory, base_format, losses, differences) for base_format in FORMATS]
    print('| | %s |\n|---|%s' % (' | '.join(FORMATS), '---|' * len(FORMATS)))
    for name in columns[0]:
        print('| %s | %s |' % (name, ' | '.join(cells[name] for cells in columns)))
    print('\n| SHA-256 of the adapter after a few steps on fp8_row | |\n|---|---|')
    for way, text in (('memory', 'one rank, base in memory'), ('disk', 'one rank, base on disk'),
                      ('killed', 'one rank, SIGKILL after the first checkpoint, resumed'),
                      ('sharded', 'two ranks, base sharded between them'), ('resident', 'two ranks, whole base on each')):
        print('| %s | `%s` |' % (text, sha256(directory, 'way-' + way)))


if __name__ == '__main__':
    main()
