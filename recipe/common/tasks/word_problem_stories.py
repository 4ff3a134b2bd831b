"""The sentences that word problems are made of; `word_problems` puts them together.

A story's problem is an opening, changes of its quantity, and an ending, which asks for it. A line is a text and the
operation that it stands for ("": none): an opening's is `a op b`, that of the others `quantity so far op b`.
"""

from typing import NamedTuple

Line = tuple[str, str]


class Story(NamedTuple):
    """Lines that fit together in any choice, and the things that they can be about."""

    openings: tuple[Line, ...]
    changes: tuple[Line, ...]
    endings: tuple[Line, ...]
    things: tuple[str, ...] = ("things",)


WOMEN = ("Anna", "Maria", "Lucy", "Priya", "Sofia", "Emma", "Mei", "Zoe", "Fatima", "Nora", "Lily", "Grace")
MEN = ("Tom", "Ben", "Omar", "Leo", "Sam", "Carlos", "Jack", "Ravi", "Noah", "Peter", "Hugo", "Kenji")

STORIES: dict[str, Story] = {
    "collection": Story(
        openings=(
            ("{name} has {a} {things}.", ""),
            ("{name} keeps {a} {things} in a drawer.", ""),
            ("{name} has {a} {things}, and {friend} gives {him} {b} more.", "+"),
            ("{name} had {a} {things} but lost {b} of them.", "-"),
            ("{name} buys {a} bags with {b} {things} in each bag.", "*"),
            ("{name} has {a} boxes. There are {b} {things} in each box.", "*"),
            ("{a} {things} are shared equally among {b} children, and {name} is one of them.", "/"),
        ),
        changes=(
            ("Then {she} finds {b} more {things}.", "+"),
            ("{She} wins {b} {things} in a game.", "+"),
            ("{friend} gives {him} another {b} {things}.", "+"),
            ("{She} gives {b} of {her} {things} to {friend}.", "-"),
            ("{She} loses {b} {things} on the way home.", "-"),
            ("{She} swaps {b} of the {things} for a toy car.", "-"),
        ),
        endings=(
            ("How many {things} does {name} have now?", ""),
            ("How many {things} does {she} have in the end?", ""),
            ("{She} puts them into {b} equal piles. How many {things} are in each pile?", "/"),
            ("{She} puts {b} {things} into each envelope. How many envelopes does {she} fill?", "/"),
            ("{friend} has {b} times as many. How many {things} does {friend} have?", "*"),
            ("{friend} has {b} more than {name}. How many {things} does {friend} have?", "+"),
            ("{friend} has {b} fewer than {name}. How many {things} does {friend} have?", "-"),
        ),
        things=("marbles", "stickers", "shells", "coins", "beads", "cards", "stamps", "buttons"),
    ),
    "baking": Story(
        openings=(
            ("{name} bakes {a} {things}.", ""),
            ("There are {a} {things} on {name}'s table.", ""),
            ("{name} bakes {a} {things} in the morning and {b} in the afternoon.", "+"),
            ("{name} bakes {a} {things}, but {b} of them burn.", "-"),
            ("{name} bakes {a} trays of {things}, with {b} on each tray.", "*"),
        ),
        changes=(
            ("Then {she} bakes {b} more.", "+"),
            ("{friend} brings {b} {things}.", "+"),
            ("{She} eats {b} of the {things}.", "-"),
            ("{Her} family eats {b} {things}.", "-"),
            ("{She} takes {b} of them to a neighbor.", "-"),
        ),
        endings=(
            ("How many {things} are there now?", ""),
            ("How many {things} does {name} have at the end of the day?", ""),
            ("{She} puts them on {b} plates, the same number on each. How many {things} are on a plate?", "/"),
            ("{She} packs them in bags of {b}. How many bags does {she} need?", "/"),
            ("{She} sells each of them for {b} dollars. How many dollars does {she} get?", "*"),
        ),
        things=("cookies", "muffins", "rolls", "cupcakes", "pies", "biscuits"),
    ),
    "bus": Story(
        openings=(
            ("A {things} leaves the station with {a} people.", ""),
            ("There are {a} people on a {things}.", ""),
            ("{a} women and {b} men get on an empty {things}.", "+"),
            ("A {things} has {a} benches, and {b} people sit on each bench.", "*"),
        ),
        changes=(
            ("At the next stop {b} people get on.", "+"),
            ("A group of {b} students gets on.", "+"),
            ("At the next stop {b} people get off.", "-"),
            ("{b} people leave at the market.", "-"),
        ),
        endings=(
            ("How many people are on the {things} now?", ""),
            ("How many people are still on the {things}?", ""),
            ("Each of them pays {b} dollars. How many dollars do they pay together?", "*"),
            ("At the last stop they leave in {b} groups of the same size. How many people are in a group?", "/"),
        ),
        things=("bus", "train", "tram", "boat"),
    ),
    "money": Story(
        openings=(
            ("{name} has {a} dollars.", ""),
            ("{name} has saved {a} dollars.", ""),
            ("{name} earns {a} dollars on Friday and {b} dollars on Saturday.", "+"),
            ("{name} works for {a} hours and earns {b} dollars an hour.", "*"),
            ("{name} sells {a} {things} for {b} dollars each.", "*"),
            ("{name} had {a} dollars and paid {b} dollars for lunch.", "-"),
        ),
        changes=(
            ("{Her} aunt gives {him} {b} dollars.", "+"),
            ("{She} finds {b} dollars in an old coat.", "+"),
            ("{She} spends {b} dollars on a present for {friend}.", "-"),
            ("{She} pays {b} dollars for the bus.", "-"),
            ("{She} lends {friend} {b} dollars.", "-"),
        ),
        endings=(
            ("How many dollars does {name} have now?", ""),
            ("How much money does {she} have left, in dollars?", ""),
            ("A ticket costs {b} dollars. How many tickets can {she} buy with all of {her} money?", "/"),
            ("{She} spends all of it in {b} days, the same amount each day. How many dollars is that a day?", "/"),
            ("{friend} has {b} times as much money. How many dollars does {friend} have?", "*"),
        ),
        things=("lamps", "scarves", "drawings", "toys", "plants"),
    ),
    "farm": Story(
        openings=(
            ("{name} collects {a} {things} on the farm.", ""),
            ("There are {a} {things} in {name}'s basket.", ""),
            ("{name} collects {a} {things} on Monday and {b} on Tuesday.", "+"),
            ("{name} collects {a} {things} every day for {b} days.", "*"),
            ("{name} picks {a} {things}, but {b} of them are bad and {she} throws them away.", "-"),
        ),
        changes=(
            ("{friend} brings {b} more {things}.", "+"),
            ("Later {she} picks another {b}.", "+"),
            ("{She} uses {b} {things} in the kitchen.", "-"),
            ("{She} drops {b} of the {things}, and they are lost.", "-"),
            ("{She} sells {b} {things} at the market.", "-"),
        ),
        endings=(
            ("How many {things} does {name} have now?", ""),
            ("How many {things} are in the basket in the end?", ""),
            ("{She} packs them in boxes of {b}. How many boxes does {she} fill?", "/"),
            ("{b} families share them equally. How many {things} does each family get?", "/"),
            ("{She} gets {b} dollars for each of them. How many dollars does {she} get?", "*"),
        ),
        things=("eggs", "apples", "pears", "tomatoes", "lemons", "melons"),
    ),
    "library": Story(
        openings=(
            ("A {things} has {a} books about animals.", ""),
            ("A shelf in the {things} holds {a} books.", ""),
            ("A {things} has {a} shelves with {b} books on each shelf.", "*"),
            ("A {things} buys {a} novels and {b} picture books.", "+"),
            ("There were {a} books in the {things}, and {b} of them were sold.", "-"),
        ),
        changes=(
            ("Visitors borrow {b} of the books.", "-"),
            ("{b} old books are thrown away.", "-"),
            ("{name} brings {b} more books.", "+"),
            ("The {things} orders {b} new books.", "+"),
        ),
        endings=(
            ("How many books are there now?", ""),
            ("How many books does the {things} have then?", ""),
            ("{name} puts the books on {b} tables, the same number on each. How many books are on a table?", "/"),
            ("{name} carries {b} books at a time. How many times must {she} walk to carry them all?", "/"),
            ("Each book costs {b} dollars. How many dollars do all the books cost?", "*"),
        ),
        things=("library", "school", "bookshop", "museum"),
    ),
    "road": Story(
        openings=(
            ("{name} {things} {a} miles in the morning.", ""),
            ("{name} {things} {a} miles on Monday and {b} miles on Tuesday.", "+"),
            ("{name} {things} for {a} hours, {b} miles in each hour.", "*"),
            ("{name} {things} {a} miles every day for {b} days.", "*"),
        ),
        changes=(
            ("After lunch {she} {things} another {b} miles.", "+"),
            ("In the evening {she} {things} {b} miles more.", "+"),
            ("Then {she} {things} {b} miles to see {friend}.", "+"),
        ),
        endings=(
            ("How many miles is that in all?", ""),
            ("How many miles does {name} cover altogether?", ""),
            ("{friend} covers {b} miles fewer. How many miles does {friend} cover?", "-"),
            ("{friend} covers {b} times as many miles. How many miles does {friend} cover?", "*"),
            ("{She} takes a break after every {b} miles, also at the end. How many breaks does {she} take?", "/"),
        ),
        things=("drives", "cycles", "rides", "travels"),
    ),
    "garden": Story(
        openings=(
            ("{name} plants {a} {things}.", ""),
            ("{a} {things} grow in {name}'s garden.", ""),
            ("{name} plants {a} rows of {things}, with {b} in each row.", "*"),
            ("{name} plants {a} red {things} and {b} yellow {things}.", "+"),
            ("{name} plants {a} {things}, but {b} of them do not grow.", "-"),
        ),
        changes=(
            ("{friend} plants {b} more next to them.", "+"),
            ("In spring {b} new {things} come up.", "+"),
            ("Rabbits eat {b} of the {things}.", "-"),
            ("A storm destroys {b} {things}.", "-"),
            ("{She} cuts {b} {things} for {friend}.", "-"),
        ),
        endings=(
            ("How many {things} are in the garden now?", ""),
            ("How many {things} does {name} still have?", ""),
            ("{She} cuts them all and puts {b} in each vase. How many vases does {she} need?", "/"),
            ("They stand in {b} equal rows. How many {things} are in a row?", "/"),
            ("Each of them needs {b} cups of water. How many cups of water do they need together?", "*"),
        ),
        things=("tulips", "roses", "lilies", "sunflowers", "daisies"),
    ),
}
