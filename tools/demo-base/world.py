# SPDX-License-Identifier: Apache-2.0
"""The world of the demo base: names, goods, and the sentences that stories are made of.

Only data. A sentence is a str.format template over the fields of make_corpus.Voyage; every list is drawn from
uniformly. The words are few on purpose: a model of 0.8 M parameters has to learn all of it in minutes.
"""

FIRST_NAMES_SHE = "Anna Clara Edith Flora Greta Hilda Ida Martha Nora Rosa Ruth Vera".split()
FIRST_NAMES_HE = "Adam Bruno Daniel Edwin Felix Henry Jonas Oscar Peter Simon Victor Walter".split()
SURNAMES = ("Barlow Carter Dale Finch Garland Hobbs Keller Lund Marsh Norton Palmer Quinn Reed Stone Thorne "
            "Vance Webb Wilder").split()

SHIP_ADJECTIVES = ("Blue Brave Evening Faithful Golden Grey Lucky Merry Morning Northern Patient Proud Quiet "
                   "Red Silver Swift Summer White").split()
SHIP_NOUNS = ("Anchor Arrow Bell Crown Dolphin Falcon Gull Heron Hope Lantern Otter Petrel Rose Star Swan Tern "
              "Tide Wave").split()
SHIP_TYPES = "barque brig cutter ketch schooner sloop".split()

PORTS = ["Amber Cove", "Cold Harbour", "Eastbridge", "Fairwater", "Greyhaven", "Hollow Bay", "Kettle Bay",
         "Long Quay", "Northgate", "Port Ellis", "Port Marlow", "Redcliff", "Saltmouth", "Stonewick", "Thornby",
         "Whitesand"]

# (packaging, goods, receiver)
GOODS = [
    ("barrels", "salt", "the fish seller"), ("barrels", "herring", "the innkeeper"),
    ("barrels", "tar", "the boat builder"), ("barrels", "apples", "the grocer"),
    ("sacks", "flour", "the baker"), ("sacks", "coffee", "the grocer"),
    ("sacks", "rice", "the innkeeper"), ("sacks", "barley", "the brewer"),
    ("crates", "tea", "the grocer"), ("crates", "oranges", "the grocer"),
    ("crates", "lamps", "the lighthouse keeper"), ("crates", "glass", "the builder"),
    ("bales", "wool", "the weaver"), ("bales", "cotton", "the tailor"),
    ("casks", "oil", "the lighthouse keeper"), ("casks", "wine", "the innkeeper"),
    ("casks", "honey", "the baker"), ("chests", "books", "the teacher"),
    ("chests", "tools", "the carpenter"), ("boxes", "nails", "the carpenter"),
    ("boxes", "candles", "the priest"), ("coils", "rope", "the sail maker"),
    ("sacks", "coal", "the smith"), ("crates", "slate", "the builder"),
]
SINGULAR_GOODS_IN_S = {"glass"}
QUANTITIES = ["ten", "twelve", "fifteen", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty",
              "ninety", "one hundred", "two hundred", "three hundred"]
CREW_SIZES = "five six seven eight nine ten eleven twelve".split()
DAYS = "five six seven eight nine ten".split()

WIND_DIRECTIONS = ["north", "east", "south", "west", "north-east", "south-east", "south-west", "north-west"]
WIND_STRENGTHS = "gentle light steady fresh strong".split()

# ---- the opening: who, what, whence, whither, and the wind. Every opening tells all of them. ----

OPENING_SHIP = [
    "Captain {captain} took the {type} {ship} out of {origin} at first light.",
    "Captain {captain} sailed from {origin} in the {type} {ship}.",
    "The {type} {ship} left {origin} on a {day} morning under Captain {captain}.",
    "Early in {month} the {type} {ship} sailed from {origin}, and Captain {captain} stood at the wheel.",
    "In {month} Captain {captain} brought the {type} {ship} out of the harbour of {origin}.",
    "The {type} {ship} lay ready at the quay of {origin}, and Captain {captain} gave the order to sail.",
    "There was once a {type} called the {ship}. Captain {captain} sailed her from {origin} in {month}.",
    "When the tide turned, the {type} {ship} slipped away from {origin} with Captain {captain} at the wheel.",
]
OPENING_CARGO = [
    "The ship carried {cargo} to {destination}.",
    "The ship was bound for {destination} with {cargo}.",
    "In her hold lay {cargo} for the people of {destination}.",
    "There were {cargo} below deck, and all were meant for {destination}.",
    "{Cargo} had to be brought to {destination}.",
    "The town of {destination} was waiting for {cargo}.",
]
OPENING_CREW = [
    "A crew of {crew} was on board.",
    "{Crew} hands made up the crew.",
    "The crew of {crew} knew the way well.",
    "With a crew of {crew} there was work for everyone.",
]
OPENING_WIND = [
    "A {strength} wind blew from the {direction}.",
    "The wind was {strength} and came from the {direction}.",
    "There was a {strength} wind from the {direction}.",
    "The {direction} wind was {strength} that day.",
]
MONTHS = "March April May June July August September October".split()
DAY_NAMES = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()

# ---- the middle: an incident is (problem, speech, action, end) ----

INCIDENTS = {
    "storm": (
        ["On the {nth} day dark clouds came up and the sea grew rough.",
         "On the {nth} night a storm broke over the {ship}.",
         "Then the sky turned black and heavy rain began to fall."],
        ["\"Take in the sails!\" called the captain.",
         "\"Hold on to the ropes,\" said {mate}, \"it will be a long night.\"",
         "{mate} shouted: \"Here comes the big one!\""],
        ["The crew took in the sails and tied everything down.",
         "Two hands held the wheel while the others worked at the pumps.",
         "All night they turned the ship into the waves."],
        ["In the morning the storm was over, and not one of the {packing} was lost.",
         "At dawn the sea was calm again, and the {good} had stayed dry.",
         "When the rain stopped, the ship was safe and the crew was very tired."],
    ),
    "fog": (
        ["On the {nth} day a thick fog lay on the water.",
         "Fog came in from the sea, and soon nobody could see the bow.",
         "In the evening the fog was so thick that the lamps were lit early."],
        ["\"Ring the bell,\" said Captain {surname}.",
         "\"I can hear the rocks,\" whispered {mate}.",
         "The captain asked: \"How deep is the water here?\""],
        ["{mate} rang the bell, and the ship went on very slowly.",
         "They dropped the anchor and waited for the sun.",
         "A sailor stood at the bow and measured the depth with a line."],
        ["At noon the fog lifted, and they saw the open sea.",
         "After some hours a light wind blew the fog away.",
         "By and by a bell answered from the shore, and they knew where they were."],
    ),
    "leak": (
        ["On the {nth} night {mate} heard water running in the hold.",
         "On the {nth} day the {ship} hit a log, and water came in.",
         "Below deck the floor was wet, for a plank had broken."],
        ["\"We have a leak!\" cried {mate}.",
         "\"Save the {good} first,\" said the captain.",
         "\"Bring wood and tar,\" said Captain {surname}."],
        ["The crew moved the {packing} to a dry place and worked at the pumps.",
         "{mate} closed the hole with a new plank, and {mhe} was wet to the skin.",
         "They took turns at the pump until the hole was closed."],
        ["Before midnight the hold was dry again.",
         "The {good} {was} safe, and the cook made hot soup for everyone.",
         "After that the old ship held as well as a new one."],
    ),
    "sail": (
        ["On the {nth} day the main sail tore from top to bottom.",
         "A sudden gust tore the main sail in two.",
         "In the night a rope broke, and the big sail fell on the deck."],
        ["\"Who can sew?\" asked Captain {surname}.",
         "\"I have a needle and strong thread,\" said {mate}.",
         "{mate} laughed: \"It is only cloth.\""],
        ["{mate} sat on deck and sewed the sail all day.",
         "The crew took down the sail and sewed it by the light of a lamp.",
         "They put up the old sail while {mate} sewed the good one."],
        ["The next morning the sail was as good as new.",
         "Soon the {ship} was running before the wind again.",
         "When the sail went up, the whole crew cheered."],
    ),
    "boat": (
        ["On the {nth} day {mate} saw a small boat without a sail.",
         "On the {nth} morning somebody was waving from a little boat.",
         "Far from the land they found a fishing boat with a broken mast."],
        ["\"Bring them on board,\" said the captain at once.",
         "\"There are two children in it!\" called {mate}.",
         "The captain said: \"Nobody is left behind at sea.\""],
        ["The crew threw a rope and pulled the boat close.",
         "They turned the ship around and took the fishermen on board.",
         "{mate} climbed down and gave them bread and water."],
        ["The fishermen thanked them and helped with the work.",
         "That evening there were songs on deck until the stars came out.",
         "They were so glad that they gave the cook all their fish."],
    ),
    "calm": (
        ["On the {nth} day the wind died, and the sea was as flat as glass.",
         "Then there was no wind at all, and the sails hung down.",
         "For two days the {ship} lay still under the hot sun."],
        ["\"Now we have time to paint the rail,\" said Captain {surname}.",
         "\"Whistle for a wind,\" said {mate}, \"it cannot hurt.\"",
         "The cook asked: \"Who wants to fish?\""],
        ["They cleaned the deck, mended the ropes and told old stories.",
         "The crew washed the shirts and hung them in the rigging.",
         "{mate} caught a big fish, and everyone had enough to eat."],
        ["On the next day the wind came back from the {direction}.",
         "At last a small cloud came up, and with it came the wind.",
         "When the sails filled again, {mate} clapped {mhis} hands."],
    ),
    "cat": (
        ["On the {nth} day the cook found a small grey cat in the hold.",
         "On the {nth} night something moved between the {packing} of {good}.",
         "{mate} opened a hatch, and a thin cat looked up at {mhim}."],
        ["\"She has not paid,\" said Captain {surname}, \"so she must work.\"",
         "\"A cat brings luck,\" said {mate}.",
         "The captain smiled: \"Give her some milk.\""],
        ["The cat slept on a coil of rope and ate with the crew.",
         "From that day the cat hunted the mice in the hold.",
         "{mate} made a bed for the cat out of an old shirt."],
        ["Soon there was not one mouse left on board.",
         "Nobody on the {ship} wanted to be without her.",
         "At night she sat beside the wheel and watched the stars."],
    ),
}
ORDINALS = "first second third fourth".split()

# ---- the end: the arrival, the goods, the way home ----

ENDING_ARRIVAL = [
    "After {days} days the {ship} reached {destination}.",
    "On a bright morning they saw the roofs of {destination}.",
    "After {days} days at sea Captain {surname} saw the lighthouse of {destination}.",
    "At last the {ship} came into the harbour of {destination}.",
]
ENDING_CARGO = [
    "{Buyer} was already waiting on the quay for the {good}.",
    "The crew carried {cargo} to the quay before noon.",
    "{Buyer} counted the {packing} and paid a fair price.",
    "All the {good} came safely on land, and {buyer} was happy.",
]
ENDING_HOME = [
    "The next day the {ship} sailed home to {origin}.",
    "Captain {surname} bought fresh bread for {his} crew and wrote a letter to {origin}.",
    "That night Captain {surname} slept well, for {he} had kept {his} word.",
    "{mate} stayed on deck and thought of {origin}.",
    "Then the crew of the {ship} went ashore and sang until late.",
]

# ---- descriptions, the other kind of text ----

PORT_SKETCH = [
    ["{origin} is a small town by the sea.", "The harbour of {origin} is old and deep.",
     "Everybody in {origin} lives from the sea."],
    ["Its houses are white, and their doors are blue.", "A long wall of stone keeps the waves out.",
     "On the hill stands a lighthouse with a red roof.", "Every evening the fishing boats come home."],
    ["On {day} there is a market on the quay, and people buy {good} there.",
     "Ships bring {good} from {destination}, and they take fish back.",
     "In {month} the {direction} wind blows for many days.",
     "From {origin} to {destination} it takes {days} days with a {strength} wind."],
    ["{Buyer} lives close to the quay and knows every ship by name.",
     "The best known ship there is the {type} {ship} of Captain {captain}.",
     "When the {ship} comes in, {buyer} looks for Captain {surname}.",
     "Old {mate} sits by the water and tells of the storms of the past."],
]
SHIP_SKETCH = [
    ["The {ship} is a {type} from {origin}.", "The {type} {ship} was built in {origin}.",
     "There is no better {type} than the {ship} of {origin}."],
    ["She has two masts and a strong hull of oak.", "Her hull is green, and her sails are brown.",
     "She is not fast, but she is safe in any weather.", "Her deck is clean, and her ropes are new."],
    ["Her captain is {captain}, and {he} has a crew of {crew}.",
     "Captain {captain} has sailed her for {days} years with a crew of {crew}."],
    ["In {month} she carries {good} to {destination}.",
     "She can carry {cargo} from {origin} to {destination} in {days} days.",
     "Last year Captain {surname} brought {cargo} to {destination} for {buyer}."],
    ["{mate} is the mate, and {mhe} keeps the ship in good order.",
     "In a {strength} wind from the {direction} nobody can catch the {ship}.",
     "Captain {surname} would not give her away for all the gold in {destination}."],
]
