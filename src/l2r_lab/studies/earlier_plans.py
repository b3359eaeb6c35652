"""Plans that were registered before two rules of today, known by the digests of their texts.

**Training must have added it** is a rule for losses alone. In these plans it is one for every
metric, unless the plan says otherwise.

**The number of seeds is fixed.** Eight of these plans added seeds until an interval was narrow, and
took the deviation of the first seeds (Stein, 1945). At the deviations that were found their rules
need more seeds than the plans allow. They are closed as they are: judged by the rules that they
were registered with, the plain paired t beside, and run no more.
"""

CLOSED = frozenset(
    {
        "f14614003f7df8c0",  # decision
        "8ccb0170f51f8f53",  # experts-256
        "73899053bf9435bd",  # flips-decision
        "333c625a363ec465",  # flips
        "eb27ec221c258873",  # paper
        "e081a4bd9ae68b53",  # rank-8-of-256
        "007dbe7010b2ee38",  # ranked-1024
        "5564c05893945943",  # ranked-64
    }
)
EARLIER = CLOSED | {
    "9fc226314b8a3859",  # anchor-lr-1024
    "2b9739ddfc3007ba",  # digits
    "0d530b3aa2b0bcf1",  # experts-1024
    "c35fb434b36a5455",  # experts-64-width-256
    "8c6a906ede29aa20",  # experts-64
    "f5875f3c79fe2698",  # fashion-mnist
    "0adbdb0a4339d24f",  # flips-screen
    "d57548cd3f43cd05",  # needed-rank
    "17bb6b0dc3c70a1b",  # parts-256
    "c4855515aa9c9399",  # rivals-1024
    "fea2eb61730a7b4c",  # rivals-256
    "38396c184a70f7b1",  # rivals-64
    "e7fe54f949171664",  # screen-256
    "f4db6d3a734bde2b",  # screen-proposed
    "dc9fb90384a24a80",  # screen
    "892f454240a1b50e",  # transfer
    "f7a65af5f727c260",  # why-256
    "a7d68696171c4eb3",  # width-256
}
