from report import by_city, by_month, by_product

SALES = [
    {"city": "Oslo", "month": "2024-01", "product": "tea", "amount": 5},
    {"city": "Rome", "month": "2024-01", "product": "oil", "amount": 7},
    {"city": "Oslo", "month": "2024-02", "product": "oil", "amount": 1},
]


def test_city():
    assert by_city(SALES) == "city\nOslo   6\nRome   7\ntotal 13"


def test_month():
    assert by_month(SALES) == "month\n2024-01 12\n2024-02  1\ntotal   13"


def test_product():
    assert by_product(SALES) == "product\noil    8\ntea    5\ntotal 13"
