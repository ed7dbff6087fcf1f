/* cuDNN's recorded answers: profiles by compute capability, version and card, and rules for versions that no profile
 * covers (vaemem/prediction/profiles.py describes the files).
 *
 *   card, version -> profiles, the nearest version first
 *   compute capability, version -> profiles that bound an unrecorded version's answers */
#ifndef VM_CATALOGUE_H
#define VM_CATALOGUE_H

#include "lookup.h"

enum { VM_CARD_KEY = 64, VM_RULE_CAPABILITIES = 16 };

/* A card as cuDNN's heuristics see it. sm: compute capability, 89 for 8.9. */
typedef struct vm_card {
    char key[VM_CARD_KEY]; /* its name */
    int sm, multiprocessors;
} vm_card;

/* What a rule is worth: inferred, and taken all the same; possible, so that it only widens the band; or measured on a
 * card, so that it replaces nothing. */
typedef enum vm_standing { VM_RULE_TAKEN, VM_RULE_POSSIBLE, VM_RULE_MEASURED, VM_STANDINGS } vm_standing;

/* A rule that answers before profiles do. Versions are numbers as in vm_lookup_torch. */
typedef struct vm_card_rule {
    vm_rule rule;
    int as;                               /* the version whose profile answers; 0: the rule's formula */
    int since, before;                    /* valid for cuDNN from one version to before another; 0: for any */
    int capability[VM_RULE_CAPABILITIES]; /* valid for these */
    size_t capabilities;                  /* 0: for any */
    vm_standing standing;
} vm_card_rule;

/* A profile in the catalogue. Before it is loaded, `profile` is NULL. */
typedef struct vm_recorded {
    int sm, version;
    vm_card *card; /* the cards that it is limited to; owned */
    size_t cards;  /* 0: valid for all of its compute capability */
    bool inferred; /* measured, not answered by cuDNN's heuristics: valid for its own version only */
    const vm_profile *profile;
} vm_recorded;

/* Loads profile number `number`: sets *inferred and *profile, borrowed until vm_catalogue_free. */
typedef vm_status (*vm_catalogue_load)(void *context, size_t number, const vm_profile **profile, bool *inferred);

typedef struct vm_catalogue {
    vm_catalogue_load load;
    void *context;
    vm_recorded *recorded; /* [recordeds] */
    vm_card_rule *rule;    /* [rules], in the order in which they apply */
    vm_card *sample;       /* [samples]: one card of each kind */
    size_t recordeds, rules, samples;
} vm_catalogue;

vm_status vm_catalogue_new(vm_catalogue_load load, void *context, vm_catalogue **out);
void vm_catalogue_free(vm_catalogue *c); /* accepts NULL */
/* These three copy their arguments. */
vm_status vm_catalogue_add(vm_catalogue *c, int sm, int version, const vm_card *card, size_t cards);
vm_status vm_catalogue_add_rule(vm_catalogue *c, const vm_card_rule *rule);
vm_status vm_catalogue_add_sample(vm_catalogue *c, const vm_card *card);

/* Numbers of loaded profiles. The caller owns the array, which is scratch. */
typedef struct vm_profile_list {
    size_t count;
    uint32_t *number;
} vm_profile_list;

/* One profile for each recorded version of a card's compute capability, nearest to `version` first (0: the newest
 * first). If a version has several, for different cards, the one for the card itself, otherwise the one for the card
 * with the nearest number of multiprocessors. */
vm_status vm_catalogue_near(vm_catalogue *c, const vm_card *card, int version, vm_profile_list *out);
/* *number: the first of vm_catalogue_near that may answer for the version; -1 if there is none. */
vm_status vm_catalogue_nearest(vm_catalogue *c, const vm_card *card, int version, int *number);
/* Profiles from cuDNN's heuristics that bound the answers of `version` (0: any) on a compute capability.
 *
 * A version between two recorded versions of this capability answers as one of that capability's profiles. Older and
 * newer versions may answer as any profile of the family: compute capability 8.0 and later, which have TF32, or 7.x.
 * benchmarks/left_out.py tests this rule. Equal profiles are listed once. */
vm_status vm_catalogue_relatives(vm_catalogue *c, int sm, int version, vm_profile_list *out);
/* Whether a rule is valid for a card and a version (0: any). */
bool vm_card_rule_holds(const vm_card_rule *rule, int sm, int version);

#endif
