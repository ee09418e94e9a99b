"""The catalogue of data sets: for each name its files, official address, checksums, classes, licence and citation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from dropconnectpp.lab.data.dataset import Arrays, DataError
from dropconnectpp.lab.data.formats import cifar, embedded, idx, norb, svhn


@dataclass(frozen=True)
class Entry:
    """One data set of the catalogue."""

    name: str
    title: str
    counts: tuple[int, int]
    """Numbers of training and test images."""
    shape: tuple[int, int, int]
    classes: tuple[str, ...]
    licence: str
    citation: str
    read: Callable[[Path], Arrays]
    find: Callable[[Path], dict[str, Path]]
    """The files that `read` would read, by name."""
    address: str = ""
    downloads: tuple[str, ...] = ()
    """Names of the files to download from `address`."""
    official: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """md5 or sha256 sums by file name: first of the published file, then of the content of its gzip."""
    single: bool = False
    """Whether `read` takes the one downloaded archive instead of a folder of files."""
    system_folder: Path | None = None
    """Where an operating system's package installs the files."""

    @property
    def embedded(self) -> bool:
        """Whether it comes with this package, so that there is nothing to fetch."""
        return not self.downloads


def entry_named(name: str) -> Entry:
    """The entry of that name, or an error that lists the names."""
    try:
        return CATALOGUE[name]
    except KeyError:
        known = ", ".join(CATALOGUE)
        raise DataError(f"There is no data set {name!r}. Choose from {known}, or folder:PATH.") from None


CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
CIFAR100_NAMES = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can
castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin
elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster
man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck
pine_tree plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk
skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone television tiger
tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm
"""
CIFAR100_CLASSES = tuple(CIFAR100_NAMES.split())
DIGITS = tuple("0123456789")
FASHION = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
NORB_CLASSES = ("animal", "human", "airplane", "truck", "car")

KRIZHEVSKY = "Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009"
XIAO = "Xiao, Rasul & Vollgraf, Fashion-MNIST: a Novel Image Dataset for Benchmarking Machine Learning Algorithms, 2017"

CIFAR10_SUMS = {
    "cifar-10-python.tar.gz": "c58f30108f718f92721af3b95e74349a",
    "cifar-10-binary.tar.gz": "c32a1d4ab5d03f1284b67883e8d87530",
    "data_batch_1": "c99cafc152244af753f735de768cd75f",
    "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "634d18415352ddfa80567beed471001a",
    "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "40351d587109b95175f43aff81a1287e",
    "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
    "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
    "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
    "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
    "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
    "test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
}
CIFAR100_SUMS = {
    "cifar-100-python.tar.gz": "eb9058c3a382ffc7106e4002c42a8d85",
    "cifar-100-binary.tar.gz": "03b5dce01913d631647c71ecec9e9cb8",
    "train": "16019d7e3df5f24257cddd939b257f8d",
    "test": "f0ef6b0ae62326f3e7ffdfab6717acfc",
    "train.bin": "6172c7755cfe09b2fe270c85cebc1b15",
    "test.bin": "4499cfba6c016c1be1438163640a0898",
}
SVHN_SUMS = {
    "train_32x32.mat": "e26dedcc434d2e4c54c9b2d4a06d8373",
    "test_32x32.mat": "eb5a983be6a315427106f1b164d9cef3",
}
NORB_SUMS = {  # of the .gz files
    f"{norb.STEMS[0]}-dat.mat": "5ffd6272a07d32695ee1082a26a41a93a37aab8c28da047f8c34ed348d214873",
    f"{norb.STEMS[0]}-cat.mat": "2784e542c1922060691090952b6cd6278879a216c90f81476f0f00256d42cdaa",
    f"{norb.STEMS[0]}-info.mat": "de7eb932ebe7a4ee16217fead60660d0eb3d23632c2f4d1c51f88c501c17bf32",
    f"{norb.STEMS[1]}-dat.mat": "cf7104eed3e51174d2f65b66d1e5878b9da233b886f161b0d88f4510ba2c7474",
    f"{norb.STEMS[1]}-cat.mat": "ecaf6d5bb8c3bc5eab9cf0258f6d2198dd474e016e374836fc097f2e5ff509ff",
    f"{norb.STEMS[1]}-info.mat": "16adf314226327ee006d1a44db8cfef52773c06c829951d5653a9f6f310248a2",
}
FASHION_SUMS = {  # of the .gz files, and of their contents
    "train-images-idx3-ubyte": ("8d4fb7e6c68d591d4c3dfef9ec88bf0d", "f4a8712d7a061bf5bd6d2ca38dc4d50a"),
    "train-labels-idx1-ubyte": ("25c81989df183df01b3e8a0aad5dffbe", "9018921c3c673c538a1fc5bad174d6f9"),
    "t10k-images-idx3-ubyte": ("bef4ecab320f06d8554ea6380940ec79", "8181f5470baa50b63fa0f6fddb340f0a"),
    "t10k-labels-idx1-ubyte": ("bb300cfdad3c16e7a12a480ee83cd310", "15d484375f8d13e6eb1aabb0c3f46965"),
}
MNIST_SUMS = {
    "train-images-idx3-ubyte": ("f68b3c2dcbeaaa9fbdd348bbdeb94873", "6bbc9ace898e44ae57da46a324031adb"),
    "train-labels-idx1-ubyte": ("d53e105ee54ea40749a09fcbcd1e9432", "a25bea736e30d166cdddb491f175f624"),
    "t10k-images-idx3-ubyte": ("9fb629c4189551a2d022fa330f9573f3", "2646ac647ad5339dbf082846283269ea"),
    "t10k-labels-idx1-ubyte": ("ec29112dd5afa0611ce80d1b7f02629c", "27ae3e4e09519cfbb04c329615203637"),
}


def _tuples(sums: Mapping[str, str | tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    return {name: (one,) if isinstance(one, str) else one for name, one in sums.items()}


_ENTRIES = [
    Entry(
        name="cifar10",
        title="CIFAR-10",
        counts=(50_000, 10_000),
        shape=(3, 32, 32),
        classes=CIFAR10_CLASSES,
        licence="no licence stated; for research",
        citation=KRIZHEVSKY,
        read=partial(cifar.read, variant=cifar.CIFAR10, classes=CIFAR10_CLASSES),
        find=partial(cifar.find, variant=cifar.CIFAR10),
        address="https://www.cs.toronto.edu/~kriz/",
        downloads=("cifar-10-python.tar.gz",),
        official=_tuples(CIFAR10_SUMS),
        single=True,
    ),
    Entry(
        name="cifar100",
        title="CIFAR-100",
        counts=(50_000, 10_000),
        shape=(3, 32, 32),
        classes=CIFAR100_CLASSES,
        licence="no licence stated; for research",
        citation=KRIZHEVSKY,
        read=partial(cifar.read, variant=cifar.CIFAR100, classes=CIFAR100_CLASSES),
        find=partial(cifar.find, variant=cifar.CIFAR100),
        address="https://www.cs.toronto.edu/~kriz/",
        downloads=("cifar-100-python.tar.gz",),
        official=_tuples(CIFAR100_SUMS),
        single=True,
    ),
    Entry(
        name="svhn",
        title="Street View House Numbers, cropped digits",
        counts=(73_257, 26_032),
        shape=(3, 32, 32),
        classes=DIGITS,
        licence="for non-commercial use only",
        citation="Netzer et al., Reading Digits in Natural Images with Unsupervised Feature Learning, 2011",
        read=partial(svhn.read, classes=DIGITS),
        find=svhn.find,
        address="http://ufldl.stanford.edu/housenumbers/",
        downloads=svhn.NAMES,
        official=_tuples(SVHN_SUMS),
    ),
    Entry(
        name="norb",
        title="small NORB, stereo pairs",
        counts=(24_300, 24_300),
        shape=(2, 32, 32),
        classes=NORB_CLASSES,
        licence="for research; not to be redistributed",
        citation="LeCun, Huang & Bottou, Learning Methods for Generic Object Recognition with Invariance to Pose and "
        "Lighting, 2004",
        read=partial(norb.read, classes=NORB_CLASSES),
        find=norb.find,
        address="https://cs.nyu.edu/~ylclab/data/norb-v1.0-small/",
        downloads=tuple(f"{name}.gz" for name in NORB_SUMS),
        official=_tuples(NORB_SUMS),
    ),
    Entry(
        name="fashion-mnist",
        title="Fashion-MNIST",
        counts=(60_000, 10_000),
        shape=(1, 32, 32),
        classes=FASHION,
        licence="MIT, Zalando SE",
        citation=XIAO,
        read=partial(idx.read, classes=FASHION),
        find=idx.find,
        address="http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        downloads=tuple(f"{name}.gz" for name in FASHION_SUMS),
        official=_tuples(FASHION_SUMS),
        system_folder=Path("/usr/share/datasets/fashion-mnist"),
    ),
    Entry(
        name="mnist",
        title="MNIST",
        counts=(60_000, 10_000),
        shape=(1, 32, 32),
        classes=DIGITS,
        licence="CC BY-SA 3.0",
        citation="LeCun, Bottou, Bengio & Haffner, Gradient-Based Learning Applied to Document Recognition, 1998",
        read=partial(idx.read, classes=DIGITS),
        find=idx.find,
        address="https://ossci-datasets.s3.amazonaws.com/mnist/",
        downloads=tuple(f"{name}.gz" for name in MNIST_SUMS),
        official=_tuples(MNIST_SUMS),
    ),
    Entry(
        name="fashion-mini",
        title="Fashion-MNIST in small: 7,500 images that come with this package",
        counts=(6_000, 1_500),
        shape=(1, 32, 32),
        classes=FASHION,
        licence="MIT, Zalando SE",
        citation=XIAO,
        read=lambda _: embedded.read(FASHION),
        find=lambda _: {embedded.FILE.name: embedded.FILE},
    ),
]

CATALOGUE: dict[str, Entry] = {entry.name: entry for entry in _ENTRIES}
