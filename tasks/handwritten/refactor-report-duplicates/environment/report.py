"""Sales as small text tables."""


def by_city(sales):
    """Amounts by city."""
    totals = {}
    for sale in sales:
        city = sale["city"]
        if city in totals:
            totals[city] = totals[city] + sale["amount"]
        else:
            totals[city] = sale["amount"]
    width = len("total")
    for city in totals:
        if len(city) > width:
            width = len(city)
    grand = 0
    for city in totals:
        grand = grand + totals[city]
    digits = len(str(grand))
    for city in totals:
        if len(str(totals[city])) > digits:
            digits = len(str(totals[city]))
    lines = ["city"]
    for city in sorted(totals):
        lines.append(city.ljust(width) + " " + str(totals[city]).rjust(digits))
    lines.append("total".ljust(width) + " " + str(grand).rjust(digits))
    return "\n".join(lines)


def by_month(sales):
    """Amounts by month."""
    totals = {}
    for sale in sales:
        month = sale["month"]
        if month in totals:
            totals[month] = totals[month] + sale["amount"]
        else:
            totals[month] = sale["amount"]
    width = len("total")
    for month in totals:
        if len(month) > width:
            width = len(month)
    grand = 0
    for month in totals:
        grand = grand + totals[month]
    digits = len(str(grand))
    for month in totals:
        if len(str(totals[month])) > digits:
            digits = len(str(totals[month]))
    lines = ["month"]
    for month in sorted(totals):
        lines.append(month.ljust(width) + " " + str(totals[month]).rjust(digits))
    lines.append("total".ljust(width) + " " + str(grand).rjust(digits))
    return "\n".join(lines)


def by_product(sales):
    """Amounts by product."""
    totals = {}
    for sale in sales:
        product = sale["product"]
        if product in totals:
            totals[product] = totals[product] + sale["amount"]
        else:
            totals[product] = sale["amount"]
    width = len("total")
    for product in totals:
        if len(product) > width:
            width = len(product)
    grand = 0
    for product in totals:
        grand = grand + totals[product]
    digits = len(str(grand))
    for product in totals:
        if len(str(totals[product])) > digits:
            digits = len(str(totals[product]))
    lines = ["product"]
    for product in sorted(totals):
        lines.append(product.ljust(width) + " " + str(totals[product]).rjust(digits))
    lines.append("total".ljust(width) + " " + str(grand).rjust(digits))
    return "\n".join(lines)
