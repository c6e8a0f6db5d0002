#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes the text the demo needs, from a seed: the stories that train the base and the rows that fine-tune it.

    make_corpus.py stories OUT.txt      the base's corpus, one document a blank-line separated block
    make_corpus.py rows DEMO_DIR        DEMO_DIR/train.jsonl and DEMO_DIR/validation.jsonl (prompt_completion)

A document is a voyage in three paragraphs, or a short description of a port or a ship. A fine-tuning row is the
first paragraph of a voyage and, as its completion, a bill of lading, a form that no story contains: three of its lines
are to be found in the paragraph, the fourth (who waits for such goods) the base knows from its stories.
A passage, the third kind of document, is a voyage without its middle: most of its words name a fact of the opening
again, which is where a small model learns to look things up instead of inventing them. All sets draw their voyages
from one sequence without repetition, so no validation voyage is seen in training.
"""

import argparse
import itertools
import json
import random
from pathlib import Path

import world

SEED = 1852
N_STORIES = 9000
N_PASSAGES = 5000
N_TRAIN_ROWS = 640
N_VALIDATION_ROWS = 64
SKETCH_SHARE = 0.2          # of the documents are descriptions
SECOND_INCIDENT_SHARE = 0.25


def capitalised(text):
    return text[0].upper() + text[1:]


class Voyage:
    """The facts of one voyage; `fields` are the names that the templates of world.py use."""

    def __init__(self, rng):
        origin, destination = rng.sample(world.PORTS, 2)
        packing, good, buyer = rng.choice(world.GOODS)
        captain_is_she, mate_is_she = rng.random() < 0.5, rng.random() < 0.5
        first_names = world.FIRST_NAMES_SHE if captain_is_she else world.FIRST_NAMES_HE
        captain_first = rng.choice(first_names)
        mates = world.FIRST_NAMES_SHE if mate_is_she else world.FIRST_NAMES_HE
        surname = rng.choice(world.SURNAMES)
        he, his = ("she", "her") if captain_is_she else ("he", "his")
        mhe, mhim, mhis = ("she", "her", "her") if mate_is_she else ("he", "him", "his")
        cargo = f"{rng.choice(world.QUANTITIES)} {packing} of {good}"
        crew = rng.choice(world.CREW_SIZES)
        self.fields = {
            "captain": f"{captain_first} {surname}", "surname": surname, "he": he, "his": his,
            "mate": rng.choice([name for name in mates if name != captain_first]),
            "mhe": mhe, "mhim": mhim, "mhis": mhis,
            "type": rng.choice(world.SHIP_TYPES),
            "ship": f"{rng.choice(world.SHIP_ADJECTIVES)} {rng.choice(world.SHIP_NOUNS)}",
            "origin": origin, "destination": destination,
            "cargo": cargo, "Cargo": capitalised(cargo), "packing": packing, "good": good,
            "was": "were" if good.endswith("s") and good not in world.SINGULAR_GOODS_IN_S else "was",
            "buyer": buyer, "Buyer": capitalised(buyer),
            "crew": crew, "Crew": capitalised(crew), "days": rng.choice(world.DAYS),
            "day": rng.choice(world.DAY_NAMES), "month": rng.choice(world.MONTHS),
            "strength": rng.choice(world.WIND_STRENGTHS), "direction": rng.choice(world.WIND_DIRECTIONS),
        }

    def key(self):
        """What makes two voyages the same."""
        return tuple(self.fields[name] for name in ("captain", "ship", "origin", "destination", "cargo"))


def voyages(rng):
    """Voyages without repetition, without end."""
    seen = set()
    while True:
        voyage = Voyage(rng)
        if voyage.key() not in seen:
            seen.add(voyage.key())
            yield voyage


def sentence(rng, templates, voyage, **more):
    return rng.choice(templates).format(**voyage.fields, **more)


def opening(rng, voyage):
    details = [world.OPENING_CREW, world.OPENING_WIND]
    rng.shuffle(details)
    return " ".join(sentence(rng, templates, voyage)
                    for templates in [world.OPENING_SHIP, world.OPENING_CARGO, *details])


def incident(rng, name, voyage, nth):
    return " ".join(sentence(rng, templates, voyage, nth=nth) for templates in world.INCIDENTS[name])


def ending(rng, voyage):
    return " ".join(sentence(rng, templates, voyage)
                    for templates in (world.ENDING_ARRIVAL, world.ENDING_CARGO, world.ENDING_HOME))


def story(rng, voyage):
    n_incidents = 2 if rng.random() < SECOND_INCIDENT_SHARE else 1
    names = rng.sample(sorted(world.INCIDENTS), n_incidents)
    days = sorted(rng.sample(range(len(world.ORDINALS)), n_incidents))
    middle = [incident(rng, name, voyage, world.ORDINALS[day]) for name, day in zip(names, days)]
    last = ending(rng, voyage)
    return "\n".join([opening(rng, voyage), *middle, last])


def passage(rng, voyage):
    return opening(rng, voyage) + "\n" + ending(rng, voyage)


def sketch(rng, voyage):
    parts = rng.choice([world.PORT_SKETCH, world.SHIP_SKETCH])
    return " ".join(sentence(rng, templates, voyage) for templates in parts)


def bill_of_lading(voyage):
    return "\nFrom: {origin}\nTo: {destination}\nCargo: {packing} of {good}\nFor: {buyer}".format(**voyage.fields)


def make_sets():
    """(stories, passages, train rows, validation rows), the same ones on every call."""
    rng = random.Random(SEED)
    source = voyages(rng)
    stories = [sketch(rng, voyage) if rng.random() < SKETCH_SHARE else story(rng, voyage)
               for voyage in itertools.islice(source, N_STORIES)]
    rows = [{"prompt": opening(rng, voyage), "completion": bill_of_lading(voyage)}
            for voyage in itertools.islice(source, N_TRAIN_ROWS + N_VALIDATION_ROWS)]
    passages = [passage(rng, voyage) for voyage in itertools.islice(source, N_PASSAGES)]
    return stories, passages, rows[:N_TRAIN_ROWS], rows[N_TRAIN_ROWS:]


def write_rows(path, table):
    path.write_text("".join(json.dumps(row) + "\n" for row in table), encoding="utf-8")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["stories", "rows"])
    parser.add_argument("where", type=Path)
    args = parser.parse_args()
    stories, passages, train, validation = make_sets()
    if args.what == "stories":
        args.where.write_text("\n\n".join(stories + passages) + "\n", encoding="utf-8")
    else:
        write_rows(args.where / "train.jsonl", train)
        write_rows(args.where / "validation.jsonl", validation)


if __name__ == "__main__":
    main()
