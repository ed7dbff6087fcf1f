/* Workspaces on a card, and other plausible ones (plausible.h). */
#include "plausible.h"

#include <string.h>

/* The rules that a lookup tries before profiles. */
typedef enum rule_set { NO_RULES, TAKEN_RULES, POSSIBLE_RULES, CARD_RULES } rule_set;

/* Describes a lookup. profile: number of a recorded profile, or -1. version: selects the catalogue's rules; with 0 no
 * rule is taken, and every rule is possible. */
typedef struct recipe {
    int profile, version;
    rule_set rules;
    vm_guess guess;
} recipe;

typedef struct made {
    recipe recipe;
    vm_lookup *lookup;
} made;

struct vm_workspace {
    vm_catalogue *catalogue;
    vm_workspace_for of;
    vm_card_rule *rule; /* [rules], the card's own */
    size_t rules;
    recipe own;
    vm_lookup *lookup;
    vm_workspace_entry *entry; /* [entries] of the lookup */
    size_t entries;
    made *made; /* [mades]: lookups for other answers */
    size_t mades;
    vm_workspace **sample; /* [catalogue->samples], each NULL until it is needed */
};

/* ---- lookups ---- */

/* Returns: whether a lookup uses a rule. own: one of the card's, not the catalogue's. */
static bool uses_rule(const vm_workspace *w, recipe r, const vm_card_rule *rule, bool own) {
    if (own) return r.rules == CARD_RULES || (r.rules == TAKEN_RULES && rule->standing != VM_RULE_POSSIBLE);
    if (!vm_card_rule_holds(rule, w->of.card.sm, r.version)) return false;
    return rule->standing == VM_RULE_POSSIBLE ? r.rules == POSSIBLE_RULES : r.rules == TAKEN_RULES && r.version;
}

typedef struct entries {
    vm_lookup *lookup;
    vm_workspace_entry *entry; /* or NULL */
    size_t count;
} entries;

static vm_status add(vm_workspace *w, entries *e, const vm_card_rule *rule, vm_workspace_entry which) {
    const vm_profile *const profile = which.recorded < 0 ? NULL : w->catalogue->recorded[which.recorded].profile;
    vm_status s;
    if ((s = vm_lookup_add(e->lookup, rule ? &rule->rule : NULL, profile))) return s;
    if ((s = vm_scratch_grow(&e->entry, e->count, sizeof *e->entry))) return s;
    e->entry[e->count++] = which;
    return VM_OK;
}

static vm_status add_rules(vm_workspace *w, recipe r, entries *e) {
    const vm_catalogue *const c = w->catalogue;
    vm_status s;
    for (size_t i = 0; i < w->rules + c->rules; i++) {
        const bool own = i < w->rules;
        const vm_card_rule *const rule = own ? &w->rule[i] : &c->rule[i - w->rules];
        vm_workspace_entry which = {(int)i, -1};
        if (!uses_rule(w, r, rule, own)) continue;
        if (rule->as && (s = vm_catalogue_nearest(w->catalogue, &w->of.card, rule->as, &which.recorded))) return s;
        if ((!rule->as || which.recorded >= 0) && (s = add(w, e, rule, which))) return s;
    }
    return VM_OK;
}

/* Adds rules, a profile, then profiles of the nearest versions, because some files lack some kinds. */
static vm_status make(vm_workspace *w, recipe r, entries *e) {
    const bool runs = w->of.guess == VM_GUESS_RULE;
    vm_profile_list near = {0};
    *e = (entries){0};
    vm_status s;
    if ((s = vm_lookup_new(&w->of.torch, w->of.tf32, r.guess, &e->lookup))) goto done;
    if (runs && (s = vm_catalogue_near(w->catalogue, &w->of.card, w->of.torch.cudnn, &near))) goto done;
    if (runs && (s = add_rules(w, r, e))) goto done;
    if (r.profile >= 0 && (s = add(w, e, NULL, (vm_workspace_entry){-1, r.profile}))) goto done;
    for (size_t i = 0; i < near.count; i++) {
        if (w->catalogue->recorded[near.number[i]].inferred) continue;
        if ((s = add(w, e, NULL, (vm_workspace_entry){-1, (int)near.number[i]}))) goto done;
    }
done:
    vm_scratch_free(near.number);
    if (!s) return VM_OK;
    vm_lookup_free(e->lookup);
    vm_scratch_free(e->entry);
    *e = (entries){0};
    return s;
}

/* Finds or makes a lookup for other answers. */
static vm_status other_lookup(vm_workspace *w, recipe r, vm_lookup **out) {
    entries e;
    for (size_t i = 0; i < w->mades; i++)
        if (!memcmp(&w->made[i].recipe, &r, sizeof r)) return *out = w->made[i].lookup, VM_OK;
    vm_status s = make(w, r, &e);
    if (s) return s;
    vm_scratch_free(e.entry);
    s = vm_scratch_grow(&w->made, w->mades, sizeof *w->made);
    if (s) {
        vm_lookup_free(e.lookup);
        return s;
    }
    w->made[w->mades++] = (made){r, e.lookup};
    *out = e.lookup;
    return VM_OK;
}

vm_status vm_workspace_new(vm_catalogue *c, const vm_workspace_for *of, const vm_card_rule *rule, size_t rules,
                           vm_workspace **out) {
    vm_workspace *w;
    entries e = {0};
    *out = NULL;
    vm_status s = vm_scratch_new(1, sizeof *w, &w);
    if (s) return s;
    *w = (vm_workspace){.catalogue = c, .of = *of, .own = {-1, of->torch.cudnn, TAKEN_RULES, of->guess}};
    if (rules) {
        if ((s = vm_scratch_new(rules, sizeof *rule, &w->rule))) goto done;
        memcpy(w->rule, rule, rules * sizeof *rule), w->rules = rules;
    }
    if ((s = vm_scratch_new(c->samples, sizeof(vm_workspace *), &w->sample))) goto done;
    if (of->guess == VM_GUESS_RULE && (s = vm_catalogue_nearest(c, &of->card, of->torch.cudnn, &w->own.profile)))
        goto done;
    w->of.torch.sm = of->card.sm;
    w->of.torch.guessed = of->torch.cudnn       ? of->torch.cudnn
                          : w->own.profile >= 0 ? c->recorded[w->own.profile].version
                                                : 0;
    if ((s = make(w, w->own, &e))) goto done;
    w->lookup = e.lookup;
    w->entry = e.entry;
    w->entries = e.count;
done:
    if (s)
        vm_workspace_free(w);
    else
        *out = w;
    return s;
}

void vm_workspace_free(vm_workspace *w) {
    if (!w) return;
    for (size_t i = 0; w->sample && i < w->catalogue->samples; i++) vm_workspace_free(w->sample[i]);
    for (size_t i = 0; i < w->mades; i++) vm_lookup_free(w->made[i].lookup);
    vm_lookup_free(w->lookup);
    vm_scratch_free(w->sample);
    vm_scratch_free(w->made);
    vm_scratch_free(w->entry);
    vm_scratch_free(w->rule);
    vm_scratch_free(w);
}

vm_lookup *vm_workspace_lookup(vm_workspace *w) { return w->lookup; }
vm_workspace_entry vm_workspace_entry_at(const vm_workspace *w, size_t entry) { return w->entry[entry]; }

/* ---- rows ---- */

typedef struct rows {
    const vm_conv *conv;
    size_t convs, count;
    uint64_t *row; /* [count][convs]; the first row is the workspace's own */
} rows;

/* Makes room for one more row, after the last. */
static vm_status expect(rows *r, uint64_t **row) {
    vm_status s = vm_scratch_grow(&r->row, r->count, VM_MAX(r->convs, 1) * sizeof *r->row);
    *row = r->row + r->count * r->convs;
    return s;
}

/* Keeps the row after the last, unless an equal one exists. */
static void keep(rows *r) {
    const uint64_t *const row = r->row + r->count * r->convs;
    for (size_t i = 0; i < r->count; i++)
        if (!memcmp(r->row + i * r->convs, row, r->convs * sizeof *row)) return;
    r->count++;
}

static vm_status add_row(rows *r, vm_lookup *lookup) {
    uint64_t *row;
    vm_known known;
    vm_status s = expect(r, &row);
    for (size_t i = 0; !s && i < r->convs; i++)
        if (!(s = vm_lookup_conv(lookup, &r->conv[i], &known))) row[i] = known.bytes;
    if (!s) keep(r);
    return s;
}

static vm_status add_other(vm_workspace *w, rows *r, recipe recipe) {
    vm_lookup *lookup;
    vm_status s = other_lookup(w, recipe, &lookup);
    return s ? s : add_row(r, lookup);
}

/* The answers that stand for each convolution that a profile does not hold: of PyTorch itself, or of `rest`. */
static vm_status answer_rest(vm_workspace *w, const rows *r, vm_lookup *rest, vm_known *known) {
    vm_status s = VM_OK;
    for (size_t i = 0; !s && i < r->convs; i++) {
        s = vm_lookup_conv(w->lookup, &r->conv[i], &known[i]);
        if (s || known[i].own) continue;
        s = vm_lookup_conv(rest, &r->conv[i], &known[i]);
        known[i].own = false; /* to this workspace */
    }
    return s;
}

/* Fills a row with one profile's answers, and counts those it holds itself. PyTorch's own convolutions keep theirs. */
static vm_status answer_by(const vm_workspace *w, const rows *r, const vm_profile *profile, const vm_known *known,
                           uint64_t *row, size_t *held) {
    vm_status s = VM_OK;
    *held = 0;
    for (size_t i = 0; !s && i < r->convs; i++) {
        vm_profile_how how;
        bool found;
        s = vm_profile_conv(profile, &r->conv[i], w->of.tf32, &found, &row[i], &how);
        *held += found;
        if (known[i].own || !found) row[i] = known[i].bytes;
    }
    return s;
}

/* Returns: whether a profile of the list has the answers of one before it (its file says "same_as"). */
static bool is_again(const vm_catalogue *c, const vm_profile_list *profiles, size_t i) {
    size_t k = 0;
    while (c->recorded[profiles->number[k]].profile != c->recorded[profiles->number[i]].profile) k++;
    return k < i;
}

static vm_status add_copy(rows *r, const uint64_t *from) {
    uint64_t *row;
    vm_status s = expect(r, &row);
    if (s) return s;
    if (r->convs) memcpy(row, from, r->convs * sizeof *row);
    keep(r);
    return VM_OK;
}

/* Adds the answers of the profiles that hold the most of the convolutions: only the first profile's, or each profile's
 * and the most that any of them says of each convolution. */
static vm_status add_best(vm_workspace *w, rows *r, const vm_profile_list *profiles, vm_lookup *rest, bool first_only) {
    const size_t count = profiles->count, convs = r->convs;
    uint64_t *row = NULL, *most;
    vm_known *known = NULL;
    size_t *held = NULL, best = 0, kept = 0;
    vm_status s;
    if ((s = vm_scratch_new(count, sizeof *held, &held))) goto done;
    if ((s = vm_scratch_new(count + 1, convs * sizeof *row, &row))) goto done;
    if ((s = vm_scratch_new(convs, sizeof *known, &known))) goto done;
    if ((s = answer_rest(w, r, rest, known))) goto done;
    most = row + count * convs;
    for (size_t i = 0; i < count; i++) {
        if (is_again(w->catalogue, profiles, i)) continue;
        s = answer_by(w, r, w->catalogue->recorded[profiles->number[i]].profile, known, row + i * convs, &held[i]);
        if (s) goto done;
        best = VM_MAX(best, held[i]);
    }
    for (size_t i = 0; i < count && !(first_only && kept); i++) {
        if (held[i] < best || is_again(w->catalogue, profiles, i)) continue;
        for (size_t k = 0; k < convs; k++) most[k] = VM_MAX(kept ? most[k] : 0, row[i * convs + k]);
        if ((s = add_copy(r, row + i * convs))) goto done;
        kept++;
    }
    if (kept && !first_only) s = add_copy(r, most);
done:
    vm_scratch_free(known);
    vm_scratch_free(row);
    vm_scratch_free(held);
    return s;
}

/* Adds inferred profiles, and the oldest of cuDNN's own with rules that are only possible, if any of these hold. */
static vm_status add_possible(vm_workspace *w, rows *r, const vm_profile_list *near, int version) {
    const vm_catalogue *const c = w->catalogue;
    bool holds = false;
    int oldest = -1;
    vm_status s = VM_OK;
    for (size_t i = 0; i < c->rules; i++)
        holds = holds ||
                (c->rule[i].standing == VM_RULE_POSSIBLE && vm_card_rule_holds(&c->rule[i], w->of.card.sm, version));
    for (size_t i = 0; !s && holds && i < near->count; i++) {
        const int number = (int)near->number[i];
        const vm_recorded *const one = &c->recorded[number];
        if (one->inferred)
            s = add_other(w, r, (recipe){number, 0, NO_RULES, VM_GUESS_RULE});
        else if (oldest < 0 || one->version < c->recorded[oldest].version)
            oldest = number;
    }
    return s || oldest < 0 ? s : add_other(w, r, (recipe){oldest, version, POSSIBLE_RULES, VM_GUESS_RULE});
}

/* Adds other versions' answers. */
static vm_status add_versions(vm_workspace *w, rows *r, bool every) {
    vm_catalogue *const c = w->catalogue;
    const int version = every ? 0 : w->of.torch.cudnn;
    const bool inferred = !every && w->own.profile >= 0 && c->recorded[w->own.profile].inferred;
    vm_profile_list own = {0}, near = {0}, relatives = {0};
    vm_lookup *rest;
    recipe nearest = {-1, 0, NO_RULES, VM_GUESS_RULE};
    vm_status s;
    if ((s = vm_catalogue_near(c, &w->of.card, w->of.torch.cudnn, &own))) goto done;
    for (size_t i = 0; nearest.profile < 0 && i < own.count; i++)
        if (!c->recorded[own.number[i]].inferred) nearest.profile = (int)own.number[i];
    if ((s = vm_catalogue_near(c, &w->of.card, version, &near))) goto done;
    if (!inferred && (s = vm_catalogue_relatives(c, w->of.card.sm, version, &relatives))) goto done;
    if ((s = other_lookup(w, nearest, &rest))) goto done;
    if (inferred) {
        size_t asked = 0;
        for (size_t i = 0; i < own.count; i++)
            if (!c->recorded[own.number[i]].inferred) own.number[asked++] = own.number[i];
        own.count = asked;
        s = add_best(w, r, &own, rest, true);
    } else {
        if ((s = add_best(w, r, &relatives, rest, false))) goto done;
        s = add_possible(w, r, &near, version);
    }
done:
    vm_scratch_free(relatives.number);
    vm_scratch_free(near.number);
    vm_scratch_free(own.number);
    return s;
}

/* Adds the answers for a card of an unrecorded kind. */
static vm_status add_coarse(vm_workspace *w, rows *r) {
    const vm_catalogue *const c = w->catalogue;
    uint64_t *none;
    vm_status s;
    for (size_t i = 0; i < c->samples; i++) {
        vm_workspace_for of = w->of;
        vm_workspace *sample;
        of.card = c->sample[i];
        of.coarse = false;
        of.torch.cudnn = w->of.shipped;
        if (!w->sample[i]) {
            if ((s = vm_workspace_new(w->catalogue, &of, NULL, 0, &sample))) return s;
            vm_workspace_free(w->sample[i]); /* loading profiles may have run this already */
            w->sample[i] = sample;
        }
        if ((s = add_row(r, w->sample[i]->lookup))) return s;
    }
    if ((s = add_other(w, r, (recipe){w->own.profile, 0, CARD_RULES, VM_GUESS_RULE}))) return s;
    if ((s = vm_scratch_new(r->convs, sizeof *none, &none))) return s;
    s = add_copy(r, none);
    vm_scratch_free(none);
    return s;
}

/* Returns: whether a profile is for another version or other cards than the workspace, or is inferred. */
static bool differs(const vm_workspace *w, const vm_recorded *r) {
    bool same = !r->cards;
    for (size_t i = 0; i < r->cards; i++) same = same || !strcmp(r->card[i].key, w->of.card.key);
    return r->inferred || !same || (w->of.torch.cudnn && w->of.torch.cudnn != r->version);
}

/* Returns: whether an entry replaces missing data of the card or the version. */
static bool is_substitute(const vm_workspace *w, const vm_workspace_entry *e) {
    if (e->rule < 0) return differs(w, &w->catalogue->recorded[e->recorded]);
    const size_t rule = (size_t)e->rule;
    return (rule < w->rules ? w->rule[rule] : w->catalogue->rule[rule - w->rules]).standing != VM_RULE_MEASURED;
}

/* *substituted: an answer replaces missing data of the card or the version; *guessed: a rule guessed. */
static vm_status find_substitutes(vm_workspace *w, const rows *r, bool *substituted, bool *guessed) {
    for (size_t i = 0; i < r->convs; i++) {
        vm_known known;
        size_t sources;
        vm_status s = vm_lookup_conv(w->lookup, &r->conv[i], &known);
        if (s) return s;
        if (known.own) continue;
        const vm_source *const source = &vm_lookup_sources(w->lookup, &sources)[known.source];
        *guessed = *guessed || source->why;
        if (source->why) continue;
        *substituted = *substituted || is_substitute(w, &w->entry[source->entry]);
    }
    return VM_OK;
}

vm_status vm_workspace_rows(vm_workspace *w, bool every, const vm_conv *conv, size_t convs, uint64_t **row,
                            size_t *count) {
    rows r = {.conv = conv, .convs = convs};
    bool substituted = w->of.coarse, guessed = false;
    vm_status s = add_row(&r, w->lookup);
    *row = NULL;
    *count = 0;
    if (s) goto done;
    if ((s = find_substitutes(w, &r, &substituted, &guessed))) goto done;
    if (w->of.guess != VM_GUESS_RULE) {
        const vm_guess guess = w->of.guess == VM_GUESS_LEAST ? VM_GUESS_COLUMNS : VM_GUESS_LEAST;
        s = add_other(w, &r, (recipe){-1, 0, NO_RULES, guess});
    } else {
        recipe own = {w->own.profile, w->own.version, TAKEN_RULES, VM_GUESS_LEAST};
        if ((every || substituted) && (s = add_versions(w, &r, every))) goto done;
        if (guessed && (s = add_other(w, &r, own))) goto done;
        own.guess = VM_GUESS_MOST;
        if (guessed && (s = add_other(w, &r, own))) goto done;
        if (w->of.coarse) s = add_coarse(w, &r);
    }
done:
    if (s) {
        vm_scratch_free(r.row);
        return s;
    }
    r.count--; /* drops the workspace's own, the first */
    if (convs) memmove(r.row, r.row + convs, r.count * convs * sizeof *r.row);
    *row = r.row;
    *count = r.count;
    return VM_OK;
}
