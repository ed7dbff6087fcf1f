/* cuDNN's recorded answers (catalogue.h). */
#include "catalogue.h"

#include <stdlib.h>
#include <string.h>

vm_status vm_catalogue_new(vm_catalogue_load load, void *context, vm_catalogue **out) {
    vm_status s = vm_scratch_new(1, sizeof **out, out);
    if (!s) (*out)->load = load, (*out)->context = context;
    return s;
}

void vm_catalogue_free(vm_catalogue *c) {
    if (!c) return;
    for (size_t i = 0; i < c->recordeds; i++) vm_scratch_free(c->recorded[i].card);
    vm_scratch_free(c->recorded);
    vm_scratch_free(c->rule);
    vm_scratch_free(c->sample);
    vm_scratch_free(c);
}

vm_status vm_catalogue_add(vm_catalogue *c, int sm, int version, const vm_card *card, size_t cards) {
    vm_recorded one = {.sm = sm, .version = version, .cards = cards};
    vm_status s;
    if ((s = vm_scratch_grow(&c->recorded, c->recordeds, sizeof *c->recorded))) return s;
    if (cards && (s = vm_scratch_new(cards, sizeof *card, &one.card))) return s;
    if (cards) memcpy(one.card, card, cards * sizeof *card);
    c->recorded[c->recordeds++] = one;
    return VM_OK;
}

vm_status vm_catalogue_add_rule(vm_catalogue *c, const vm_card_rule *rule) {
    vm_status s = vm_scratch_grow(&c->rule, c->rules, sizeof *c->rule);
    if (!s) c->rule[c->rules++] = *rule;
    return s;
}

vm_status vm_catalogue_add_sample(vm_catalogue *c, const vm_card *card) {
    vm_status s = vm_scratch_grow(&c->sample, c->samples, sizeof *c->sample);
    if (!s) c->sample[c->samples++] = *card;
    return s;
}

static vm_status load(vm_catalogue *c, size_t number) {
    const vm_profile *profile;
    bool inferred;
    if (c->recorded[number].profile) return VM_OK;
    vm_status s = c->load(c->context, number, &profile, &inferred);
    if (s) return s;
    c->recorded[number].inferred = inferred;
    c->recorded[number].profile = profile;
    return VM_OK;
}

/* How far a profile's cards are from a card: 0 if it names the card, 1 if it names none. */
static int distance(const vm_recorded *r, const vm_card *card) {
    int least = INT32_MAX;
    for (size_t i = 0; i < r->cards; i++) {
        if (!strcmp(r->card[i].key, card->key)) return 0;
        least = VM_MIN(least, abs(r->card[i].multiprocessors - card->multiprocessors));
    }
    return r->cards ? VM_MIN(least, INT32_MAX - 2) + 2 : 1;
}

/* Returns: whether version a is nearer to `version` than b, or as near and newer. */
static bool is_nearer(int a, int b, int version) {
    const int far_a = abs(a - version), far_b = abs(b - version);
    return far_a != far_b ? far_a < far_b : a > b;
}

/* Inserts profile i into the sorted list, which keeps one profile per version. */
static void insert(const vm_catalogue *c, const vm_card *card, int version, uint32_t i, vm_profile_list *list) {
    const vm_recorded *const r = c->recorded;
    size_t at = 0;
    while (at < list->count && is_nearer(r[list->number[at]].version, r[i].version, version)) at++;
    if (at < list->count && r[list->number[at]].version == r[i].version) {
        if (distance(&r[i], card) < distance(&r[list->number[at]], card)) list->number[at] = i;
        return;
    }
    memmove(list->number + at + 1, list->number + at, (list->count++ - at) * sizeof *list->number);
    list->number[at] = i;
}

vm_status vm_catalogue_near(vm_catalogue *c, const vm_card *card, int version, vm_profile_list *out) {
    int newest = 0;
    *out = (vm_profile_list){0};
    for (size_t i = 0; i < c->recordeds; i++)
        if (c->recorded[i].sm == card->sm) newest = VM_MAX(newest, c->recorded[i].version);
    vm_status s = vm_scratch_new(c->recordeds, sizeof *out->number, &out->number);
    for (size_t i = 0; !s && i < c->recordeds; i++)
        if (c->recorded[i].sm == card->sm) insert(c, card, version ? version : newest, (uint32_t)i, out);
    for (size_t i = 0; !s && i < out->count; i++) s = load(c, out->number[i]);
    if (s) vm_scratch_free(out->number), *out = (vm_profile_list){0};
    return s;
}

vm_status vm_catalogue_nearest(vm_catalogue *c, const vm_card *card, int version, int *number) {
    vm_profile_list near;
    *number = -1;
    vm_status s = vm_catalogue_near(c, card, version, &near);
    for (size_t i = 0; !s && *number < 0 && i < near.count; i++) {
        const vm_recorded *const r = &c->recorded[near.number[i]];
        if (!r->inferred || (version && r->version == version)) *number = (int)near.number[i];
    }
    vm_scratch_free(near.number);
    return s;
}

/* Returns: whether the list has an equal profile under another number. */
static bool contains(const vm_catalogue *c, const vm_profile_list *list, size_t i) {
    for (size_t k = 0; k < list->count; k++)
        if (c->recorded[list->number[k]].profile == c->recorded[i].profile) return true;
    return false;
}

vm_status vm_catalogue_relatives(vm_catalogue *c, int sm, int version, vm_profile_list *out) {
    int oldest = INT32_MAX, newest = 0;
    *out = (vm_profile_list){0};
    vm_status s = vm_scratch_new(c->recordeds, sizeof *out->number, &out->number);
    for (size_t i = 0; !s && i < c->recordeds; i++) {
        const vm_recorded *const r = &c->recorded[i];
        if ((r->sm < 80) == (sm < 80)) s = load(c, i);
        if (s || r->sm != sm || r->inferred) continue;
        oldest = VM_MIN(oldest, r->version);
        newest = VM_MAX(newest, r->version);
    }
    const bool is_between = version && oldest <= version && version <= newest;
    for (size_t i = 0; !s && i < c->recordeds; i++) {
        const vm_recorded *const r = &c->recorded[i];
        const bool counts = is_between ? r->sm == sm : (r->sm < 80) == (sm < 80);
        if (counts && !r->inferred && !contains(c, out, i)) out->number[out->count++] = (uint32_t)i;
    }
    if (s) vm_scratch_free(out->number), *out = (vm_profile_list){0};
    return s;
}

bool vm_card_rule_holds(const vm_card_rule *rule, int sm, int version) {
    if (version && (version < rule->since || (rule->before && version >= rule->before))) return false;
    for (size_t i = 0; i < rule->capabilities; i++)
        if (rule->capability[i] == sm) return true;
    return !rule->capabilities;
}
