"""The ten little worlds of the word problems: who lives there, and what can happen to them.

Pure data. How a story is put together from these sentences is told in `problems.py`; a world is a
`Theme`, and adding one changes every generated problem (and so the tokenizer and the model).
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Theme:
    """The sentences of one little world.

    Placeholders: `{n}` a number, `{k}` a number from 2 to 5, `{noun}` the things counted; `{name}`,
    `{Who}`, `{who}`, `{whom}`, `{whose}` the person they belong to (a name or a pronoun), `{other}`
    a second person, `{kin}` an aunt or an uncle, `{holder}` what the things are kept in. A story
    about a person may also use the sentences of `ANYBODY`; one about a place has no `holder`.
    """

    nouns: tuple[str, ...]
    opening: tuple[str, ...]
    gain: tuple[str, ...]
    lose: tuple[str, ...]
    packs: tuple[str, ...]  # {k} lots of {n} are added
    asides: tuple[str, ...]  # charming and irrelevant
    holder: str = ""
    double: tuple[str, ...] = ()
    triple: tuple[str, ...] = ()
    halve: tuple[str, ...] = ()
    ask: tuple[str, ...] = ()
    room: tuple[str, ...] = ()  # asks for {n} minus what there is
    more: tuple[str, ...] = ()  # asks for what there is plus {n}
    price: tuple[str, ...] = ()  # asks for what there is times {k}


FOR_SALE = ("{Who} sells all the {noun} for {k} coins each. How many coins does {who} get?",)

# What can happen to anybody, whatever they collect.
ANYBODY = Theme(
    nouns=(),
    opening=("{name} has {n} {noun}.",),
    gain=("An {kin} gives {whom} {n} more {noun}.", "{Who} gets {n} more {noun}."),
    lose=("{Who} gives away {n} {noun}.", "{Who} gives {n} {noun} to an {kin}."),
    packs=(),
    asides=("The old clock has stood still for {n} years.", "It is {n} days until the summer."),
    double=("A wizard doubles the number of {noun} {who} has.",),
    triple=("A wizard triples the number of {noun} {who} has.",),
    halve=(
        "{Who} gives half of the {noun} to an {kin}.",
        "{Who} shares the {noun} equally with an {kin}.",
    ),
    ask=("How many {noun} does {who} have now?", "How many {noun} does {who} have in the end?"),
    room=(
        "{Who} wants to have {n} {noun}. How many more {noun} does {who} need?",
        "{whose} {holder} holds {n} {noun}. How many more {noun} does {who} need to fill it?",
    ),
    more=("{other} has {n} more {noun} than {name} has now. How many {noun} does {other} have?",),
)

THEMES = (
    Theme(
        nouns=("plums", "lemons", "apples"),
        opening=("{name} brings {n} {noun} to the market.", "{name} picks {n} {noun}."),
        gain=("{Who} buys {n} more {noun} from a farmer.", "{Who} picks {n} more {noun}."),
        lose=("{Who} sells {n} {noun} before lunch.", "A goat eats {n} of {whose} {noun}."),
        packs=("A farmer brings {whom} {k} bags of {n} {noun} each.",),
        asides=("The market goat weighs {n} kg.", "The market is {n} years old."),
        holder="basket",
        price=FOR_SALE,
    ),
    Theme(
        nouns=("buns", "cakes", "pies"),
        opening=("{name} bakes {n} {noun} in the morning.", "{name} the baker has {n} {noun}."),
        gain=("{Who} bakes {n} more {noun}.",),
        lose=(
            "{Who} sells {n} {noun}.",
            "A dog runs off with {n} of {whose} {noun}.",
            "{Who} gets hungry and eats {n} {noun}.",
        ),
        packs=("{Who} bakes {k} trays of {n} {noun} each.",),
        asides=("The oven is {n} years old.", "The oven door is {n} cm wide."),
        holder="shelf",
        price=FOR_SALE,
    ),
    Theme(
        nouns=("sheep", "ducks", "geese"),
        opening=("{name} keeps {n} {noun} on a farm.", "{name} the farmer has {n} {noun}."),
        gain=("{Who} buys {n} more {noun} at the market.",),
        lose=("A fox scares away {n} of {whose} {noun}.", "{Who} sells {n} {noun}."),
        packs=("{Who} buys {k} groups of {n} {noun} each.",),
        asides=("The barn is {n} meters long.", "The farm dog weighs {n} kg."),
        holder="barn",
    ),
    Theme(
        nouns=("roses", "tulips"),
        opening=("{name} plants {n} {noun}.", "{name} grows {n} {noun} in the garden."),
        gain=("{Who} plants {n} more {noun} after the rain.", "{Who} plants {n} more {noun}."),
        lose=("A rabbit eats {n} of {whose} {noun}.", "{Who} cuts {n} {noun} and sells them."),
        packs=("{Who} plants {k} rows of {n} {noun} each.",),
        asides=("The garden gnome is {n} cm tall.", "The garden wall is {n} meters long."),
        holder="garden",
        price=FOR_SALE,
    ),
    Theme(
        nouns=("shells", "stones"),
        opening=("{name} finds {n} {noun} on the beach.", "{name} collects {n} {noun}."),
        gain=("{Who} finds {n} more {noun} in the sand.",),
        lose=("A wave takes {n} of {whose} {noun}.", "{Who} throws {n} {noun} into the sea."),
        packs=("{Who} collects {k} bags of {n} {noun} each.",),
        asides=("The beach is {n} meters wide.", "The sea is {n} meters deep."),
        holder="bag",
    ),
    Theme(
        nouns=("cards", "marbles", "stickers"),
        opening=("{name} brings {n} {noun} to school.", "{name} collects {n} {noun}."),
        gain=(
            "{Who} wins {n} more {noun} in a game.",
            "{Who} trades an old hat for {n} more {noun}.",
        ),
        lose=("{Who} loses {n} {noun} in a game.", "{Who} trades {n} {noun} for an old hat."),
        packs=("{Who} wins {k} bags of {n} {noun} each.",),
        asides=("The teacher is {n} years old.", "The school is {n} years old."),
        holder="box",
    ),
    Theme(
        nouns=("pearls", "rubies"),
        opening=("{name} the pirate hides {n} {noun}.", "{name} the pirate has {n} {noun}."),
        gain=("{Who} digs up {n} more {noun} on the beach.",),
        lose=("A parrot steals {n} of {whose} {noun}.", "{Who} loses {n} {noun} in a storm."),
        packs=("{Who} digs up {k} bags of {n} {noun} each.",),
        asides=("The oldest parrot is {n} years old.", "The ship is {n} meters long."),
        holder="chest",
        price=FOR_SALE,
    ),
    Theme(
        nouns=("people", "children"),
        opening=("A train leaves the city with {n} {noun}.", "There are {n} {noun} on a train."),
        gain=(
            "At the next stop, {n} more {noun} get on.",
            "At the beach, {n} more {noun} get on.",
            "In the rain, {n} more {noun} get on.",
        ),
        lose=(
            "At the next stop, {n} {noun} get off.",
            "At the market, {n} of the {noun} get off.",
            "After lunch, {n} of the {noun} get off.",
        ),
        packs=("Then {k} groups of {n} {noun} each get on.",),
        asides=("The driver is {n} years old.", "The train is {n} meters long."),
        double=("At the school, the number of {noun} on the train doubles.",),
        triple=("At the school, the number of {noun} on the train triples.",),
        halve=(
            "At the farm, half of the {noun} get off.",
            "At the lake, half of the {noun} get off.",
        ),
        ask=("How many {noun} are on the train now?",),
        room=("The train has room for {n} {noun}. How many more {noun} could get on?",),
        more=(
            "The next train now has {n} more {noun} than this one. "
            "How many {noun} are on the next train?",
        ),
    ),
    Theme(
        nouns=("books", "maps"),
        opening=("A library has {n} {noun}.", "A small library opens with {n} {noun}."),
        gain=(
            "The library buys {n} more {noun}.",
            "A teacher gives the library {n} more {noun}.",
            "An old pirate brings back {n} {noun}.",
        ),
        lose=(
            "The children take home {n} of the {noun}.",
            "A mouse eats {n} of the {noun}.",
            "The library sells {n} old {noun}.",
        ),
        packs=("The library buys {k} boxes of {n} {noun} each.",),
        asides=("The shelf is {n} cm tall.", "The library mouse is {n} days old."),
        double=("A rich aunt doubles the number of {noun} in the library.",),
        triple=("A rich uncle triples the number of {noun} in the library.",),
        halve=("The library gives half of the {noun} away.", "A storm takes half of the {noun}."),
        ask=("How many {noun} does the library have now?",),
        room=("The library has room for {n} {noun}. How many more {noun} could it buy?",),
        more=(
            "The school has {n} more {noun} than the library has now. "
            "How many {noun} does the school have?",
        ),
    ),
    Theme(
        nouns=("frogs", "newts"),
        opening=("There are {n} {noun} in a pond.", "A pond is home to {n} {noun}."),
        gain=(
            "After the rain, {n} more {noun} move in.",
            "From the garden come {n} more {noun}.",
            "At night, {n} more {noun} move in.",
        ),
        lose=(
            "A stork eats {n} of the {noun}.",
            "In the morning, {n} of the {noun} leave.",
            "A fox scares away {n} of the {noun}.",
        ),
        packs=("Then {k} groups of {n} {noun} each move in.",),
        asides=("The pond is {n} meters wide.", "The water is {n} cm deep."),
        double=("A wizard doubles the number of {noun} in the pond.",),
        triple=("A wizard triples the number of {noun} in the pond.",),
        halve=("Half of the {noun} leave for the lake.", "Half of the {noun} leave after lunch."),
        ask=("How many {noun} are in the pond now?", "How many {noun} are in the pond in the end?"),
        room=("The pond has room for {n} {noun}. How many more {noun} could move in?",),
        more=(
            "The next pond now has {n} more {noun} than this one. "
            "How many {noun} are in the next pond?",
        ),
    ),
)

WOMEN = ("Anna", "Clara", "Emma", "Grace", "Iris", "Lena", "Nora", "Rosa")
MEN = ("Ben", "David", "Felix", "Hugo", "Jack", "Max", "Oscar", "Tom")
