"""Word lists of the generated tasks, and the split by content."""

from __future__ import annotations

import random
import zlib

WORDS = (
    "apple amber anchor arrow autumn badge bamboo basket beacon bell berry blanket bottle branch breeze brick bridge "
    "bronze brush bucket butter button cabin cactus camera candle canvas carbon carpet castle cedar chair chalk cherry "
    "circle clay cliff clock cloud clover coast cobalt coffee comet copper coral cotton cradle crane crystal curtain "
    "daisy dawn desert diamond dolphin dragon drum eagle earth echo ember engine falcon feather fern field flame flint "
    "flower forest fossil fountain fox frost garden garnet gate ginger glacier glass globe gold grain granite grape "
    "grass harbor hazel heron hill honey horizon horse ice indigo ink iron island ivory jacket jade jasmine jungle "
    "kettle key kite ladder lake lamp lantern laurel leaf lemon library light lily linen lion lotus magnet mango maple "
    "marble market meadow melon mercury metal mint mirror mist moon moss mountain music needle nest night nickel north "
    "oak oasis ocean olive onyx opal orange orbit orchid otter owl oyster paper parrot peach pearl pebble pencil pepper "
    "piano pillow pine planet plum pocket pond poppy prism pumpkin quartz quill rabbit radio rain raven reef ribbon "
    "river robin rocket rope rose ruby saddle sail salmon salt sand sapphire scarlet seal shadow shell shore silk "
    "silver sky slate snow spark spice spider spiral spring spruce square stable star steel stone storm stream sugar "
    "summer sun swan sword table temple thunder tiger timber topaz torch tower trail tulip turtle valley vanilla velvet "
    "violet violin wagon walnut water wave whale wheat wheel willow wind window winter wolf wood yarn zebra zinc"
).split()
FIRST_NAMES = (
    "Ada Ben Carla David Emma Felix Grace Hugo Iris Jack Kate Leo Maria Noah Olga Paul Quinn Rosa Sam Tina Uma Victor "
    "Wendy Xavier Yara Zoe Anna Boris Clara Dina Erik Fiona George Hanna Ivan Julia Karl Linda Mark Nina Oscar Petra "
    "Ralf Sara Tom Ursula Vera Will Mei Ravi Lena Omar"
).split()
LAST_NAMES = (
    "Adams Baker Clark Davis Evans Fisher Green Harris Irwin Jones Klein Lopez Miller Nolan Olsen Parker Quill Reed Smith "
    "Turner Usher Vance Walker Young Ziegler Brown Cohen Diaz Ford Gomez Hill Keller Lane Moore Novak Price Rossi Stone "
    "Wagner Wood"
).split()
CITIES = (
    "Paris London Berlin Madrid Rome Vienna Prague Oslo Dublin Lisbon Athens Warsaw Tokyo Kyoto Seoul Delhi Mumbai Cairo "
    "Lagos Nairobi Lima Bogota Quito Santiago Toronto Boston Chicago Denver Seattle Austin Miami Sydney Perth Auckland "
    "Geneva Zurich Milan Naples Munich Hamburg Bergen Malmo Helsinki Riga Tallinn Vilnius Krakow Porto Seville Valencia"
).split()
JOBS = (
    "teacher doctor nurse baker pilot painter lawyer engineer farmer chef writer singer plumber carpenter dentist driver "
    "gardener librarian mechanic musician"
).split()
COLORS = "red green blue yellow black white purple orange brown pink gray silver".split()

HELD_OUT_IN = 16  # one content in this many never appears in training


def is_held_out(content: str) -> bool:
    """Whether an item with this content (its question and answer) belongs to the held-out split."""
    return zlib.crc32(content.encode()) % HELD_OUT_IN == 0


def word(rng: random.Random) -> str:
    """A word of the list or, one time in four, an invented one."""
    if rng.random() < 0.75:
        return rng.choice(WORDS)
    return "".join(rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(rng.randint(2, 4)))


def code(rng: random.Random) -> str:
    """An identifier such as `K-4821`, `7f3a` or `QX19`."""
    kind = rng.randrange(4)
    if kind == 0:
        return f"{rng.choice('ABCDEFGHJKLMNPQRSTUVWXYZ')}-{rng.randint(10, 9999)}"
    if kind == 1:
        return "".join(rng.choice("0123456789abcdef") for _ in range(rng.randint(4, 6)))
    if kind == 2:
        return "".join(rng.choice("ABCDEFGHJKLMNPQRSTUVWXYZ") for _ in range(2)) + str(rng.randint(10, 999))
    return str(rng.randint(100, 99999))
